"""The platform as a tracker of the benchmark."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oppo_bench.telemetry import load as load
from oppo_bench.telemetry.pages import CHART, CURVE, all_drawn, logged_in, screen

if TYPE_CHECKING:
    import httpx

    from oppo_bench.telemetry.peer_trackers.tracker import Columns

BUCKETS, BUCKETS_COMPARED = 1000, 300
TABLES = ("telemetry_series", "telemetry_hotpoints", "telemetry_block")


class Ours:
    """The platform; all over HTTP except `keep` and `list_runs`."""

    name = "OPPO"
    can = frozenset({"ingest", "overview", "zoom", "compare", "table", "page", "screen", "compare_page", "samples"})

    def __init__(self, client: httpx.Client, base_url: str, owner: load.Tenant) -> None:
        self._client, self._base_url, self._owner = client, base_url, owner
        self._unsealed: list[int] = []

    def ingest(self, columns: Columns) -> float:
        """Batches of 1,000 steps, as a supervisor sends them after an outage."""
        [length] = {len(values) for values in columns.values()}
        [run] = load.runs(self._owner, 1, list(columns), "running")
        attempt, token = load.attempt_token(run)
        self._unsealed.append(attempt)
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        start = time.perf_counter()
        for body in load.batches(columns):
            self._client.post(f"/api/worker/v1/attempts/{attempt}/events", content=body, headers=headers).raise_for_status()
        keys = ",".join(columns)
        response = self._get(f"runs/{run.pk}/metrics", keys=keys, max_points=100).json()["series"]
        assert all(column["step"][-1] == length for column in response.values()), "an ingested point cannot be read"
        return time.perf_counter() - start

    def stored_bytes(self) -> int:
        """Size of the series' tables, compacted and vacuumed."""
        from django.db import connection

        from oppo_platform.telemetry.compaction import compact

        for attempt in self._unsealed:
            compact(attempt)
        self._unsealed.clear()
        with connection.cursor() as cursor:
            for table in TABLES:
                cursor.execute(f"VACUUM FULL {table}")
            cursor.execute("SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s::text[]) AS name", [list(TABLES)])
            return int(cursor.fetchone()[0])

    def keep(self, runs: Sequence[Columns]) -> list[str]:
        """Below HTTP, and compacted."""
        made = load.runs(self._owner, len(runs), list(runs[0]))
        for run, columns in zip(made, runs, strict=True):
            load.keep_history(run.attempts.get(), columns)
        return [str(run.pk) for run in made]

    def overview(self, run: str, key: str) -> list[float]:
        """About 1,000 buckets; each has its minimum and maximum, of which the maxima are returned."""
        response = self._get(f"runs/{run}/metrics", keys=key, max_points=BUCKETS).json()["series"][key]
        return list(response.get("high") or response["y"])

    def zoom(self, run: str, key: str, first: int, last: int) -> None:
        """The same for a range."""
        self._get(f"runs/{run}/metrics", keys=key, max_points=BUCKETS, since_step=first, to_step=last).json()

    def compare(self, runs: Sequence[str], key: str) -> int:
        """As the compare page requests it: curves, figures and differing settings."""
        answer = self._get("compare", runs=",".join(runs), keys=key, max_points=BUCKETS_COMPARED)
        assert len(answer.json()["series"]) == len(runs)
        return answer.num_bytes_downloaded

    def list_runs(self, count: int, keys: Sequence[str]) -> None:
        """Runs with a last value of each metric."""
        load.runs(self._owner, count, keys)

    def table(self, key: str, rows: int) -> None:
        """The runs table's own request."""
        assert len(self._get("runs", sort=f"-{key}", limit=rows).json()["items"]) == rows

    def page(self, run: str) -> tuple[str, str]:
        """The run's page."""
        return f"{self._base_url}/runs/{run}", CHART

    def screen(self, run: str) -> tuple[str, str]:
        """The run's page, scrolled to all its metrics."""
        ready = f"""() => {{
          if (document.querySelectorAll(".metric").length <= 3) return 0;
          window.jumped ??= document.getElementById("metric-groups").scrollIntoView() ?? true;
          return ({screen(CURVE)})();
        }}"""
        return f"{self._base_url}/runs/{run}", ready

    def compare_page(self, runs: Sequence[str], key: str) -> tuple[str, str]:
        """The compare page, which shows the reward first."""
        return f"{self._base_url}/compare?runs={','.join(runs)}", all_drawn(CHART, len(runs))

    def keep_samples(self, count: int, seed: int) -> str:
        """Below HTTP."""
        [run] = load.runs(self._owner, 1, [])
        load.keep_samples(run.attempts.get(), count, seed)
        return str(run.pk)

    def best_samples(self, run: str, rows: int) -> None:
        """The samples tab's own request."""
        assert len(self._get(f"runs/{run}/samples", sort="-score", limit=rows).json()["items"]) == rows

    def find_samples(self, run: str, words: Sequence[str], rows: int) -> None:
        """The same with a search."""
        assert self._get(f"runs/{run}/samples", q=" ".join(words), limit=rows).json()["items"]

    def logged_in(self, chromium: Any) -> Any:
        """Session cookie of a logged-in user."""
        return logged_in(chromium, self._base_url, self._owner.user)

    def _get(self, path: str, **asked: Any) -> httpx.Response:
        answer = self._client.get(f"/api/v1/{path}", params=asked)
        answer.raise_for_status()
        return answer
