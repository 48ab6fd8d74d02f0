"""Final errors of the platform versus errors of a proxy, which are retried."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from oppo_contract import wire
from worker.platform_api import PlatformApi, RefusedError, UnacceptableError, Unreachable

OUTCOME = wire.Outcome(epoch=1, outcome="succeeded", reason="")


def answered(status: int, body: str, media_type: str = wire.PROBLEM_TYPE) -> PlatformApi:
    """Every call gets this response."""
    api = PlatformApi("http://platform", "token")
    reply = httpx.Response(status, content=body, headers={"Content-Type": media_type})
    api._http = httpx.Client(transport=httpx.MockTransport(lambda _request: reply), base_url="http://platform")
    return api


def problem(status: int, **changes: Any) -> str:
    """Problem details as in `oppo_platform.api.problems`."""
    return json.dumps({"title": "no", "status": status, "detail": "no", "errors": [], "request_id": None} | changes)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 500, 502])
@pytest.mark.parametrize(
    ("body", "media_type"),
    [
        ("404 page not found\n", "text/plain; charset=utf-8"),
        ("<h1>Bad Request (400)</h1>", "text/html"),
        ('{"message": "no Route matched with those values"}', "application/json"),
        ('{"title": "Forbidden", "status": 403, "detail": "a gateway\'s"}', wire.PROBLEM_TYPE),
        ("[]", wire.PROBLEM_TYPE),
        ("", wire.PROBLEM_TYPE),
        (problem(418), wire.PROBLEM_TYPE),
    ],
)
def test_proxy_responses_are_retried(status: int, body: str, media_type: str) -> None:
    api = answered(status, body, media_type)
    with pytest.raises(Unreachable, match=str(status)):
        api.report_outcome(1, OUTCOME)
    with pytest.raises(Unreachable, match=str(status)):
        api.send_events(1, b"{}")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, RefusedError),
        (403, RefusedError),
        (404, RefusedError),
        (400, Unreachable),
        (422, UnacceptableError),
        (500, Unreachable),
    ],
)
def test_problem_details_are_final(status: int, error: type[Exception]) -> None:
    with pytest.raises(error, match=str(status)):
        answered(status, problem(status), f"{wire.PROBLEM_TYPE}; charset=utf-8").report_outcome(1, OUTCOME)


def test_413_is_final_from_a_proxy_too() -> None:
    with pytest.raises(UnacceptableError):
        answered(413, "<h1>Request Entity Too Large</h1>", "text/html").send_events(1, b"{}")


def test_conflicts_have_a_reason() -> None:
    with pytest.raises(RefusedError) as refused:
        answered(409, wire.Refused(detail="too late", reason="lease_lost").model_dump_json(), "application/json").report_outcome(
            1, OUTCOME
        )
    assert refused.value.reason == "lease_lost"
