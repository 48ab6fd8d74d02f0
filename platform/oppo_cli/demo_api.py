"""The platform's HTTP API as the demo uses it: what a user's notebook would do, with a user's token."""

from __future__ import annotations

from typing import Any

import httpx

from oppo_cli.home import Failure

TIMEOUT_S = 20.0


class DemoApi:
    """Calls raise `Failure` with what the platform said, and `httpx.TransportError` while it does not answer."""

    def __init__(self, base_url: str, token: str) -> None:
        self._http = httpx.Client(base_url=f"{base_url}/api/v1/", headers={"Authorization": f"Bearer {token}"}, timeout=TIMEOUT_S)

    def submit(self, yaml: str, project: int) -> tuple[int | None, list[str]]:
        """Submit a run; returns its id, or None and the complaints."""
        answer = self._http.post("runs", json={"yaml": yaml, "project": project})
        if answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            return None, [_complaint(error) for error in answer.json().get("errors", [])] or [answer.json().get("detail", "")]
        return int(_checked(answer)["id"]), []

    def run(self, run_id: int) -> dict[str, Any] | None:
        """A run's summary, or None when there is no such run."""
        answer = self._http.get(f"runs/{run_id}")
        return None if answer.status_code == httpx.codes.NOT_FOUND else _checked(answer)

    def axis(self, run_id: int, key: str, x: str) -> dict[int, float]:
        """Step → position on the axis `x` (seconds, tokens), for every step that has `key`."""
        answer = self._http.get(f"runs/{run_id}/metrics", params={"keys": key, "x": x, "max_points": 20000})
        series = _checked(answer)["series"].get(key, {"step": [], "x": []})
        return dict(zip(series["step"], series["x"], strict=True))

    def compare(self, run_ids: list[int]) -> dict[str, Any]:
        """Figures, times to the target and speed-ups, the first run being the baseline."""
        return _checked(self._http.get("compare", params={"runs": ",".join(map(str, run_ids))}))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


def _checked(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code >= 500:  # web restarts; the caller asks again
        raise httpx.ReadError(f"{answer.status_code} from {answer.url.path}")
    if not answer.is_success:
        raise Failure(f"{answer.request.method} {answer.url.path} answered {answer.status_code}: {answer.text[:500]}")
    body: dict[str, Any] = answer.json()
    return body


def _complaint(error: dict[str, str]) -> str:
    given = f" (given: {error['value']})" if error.get("value") else ""
    return f"{error.get('path') or 'the spec'}: {error.get('message', '')}{given}"
