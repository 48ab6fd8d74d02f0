"""What is sent again, with what, after how long, and what is raised in the end; against a real server that misbehaves."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from oppo_client import (
    ApiError,
    Client,
    Conflict,
    NoRoom,
    NotThePlatform,
    Refused,
    Retries,
    ServerFault,
    TooManyRequests,
    Unreachable,
)
from oppo_client.messages import post
from oppo_client.retry import retry_after_s
from tests.client.conftest import QUICK
from tests.client.misbehaving import HANG_UP, Answer, misbehaving, said, summary

RUN = summary()


def test_reading_survives_what_passes():
    passing = [HANG_UP, Answer(502, b"<html>"), said({}, 503), Answer(504), said({}, 429, Retry_After="0"), said(RUN)]
    with misbehaving(*passing) as server, Client(server.url, "t", retries=QUICK) as c:
        assert c.get(7).id == 7
        assert len(server.asked) == 6


def test_a_write_is_sent_again_with_the_same_key_and_body():
    busy = said({"detail": "still under way"}, 409, Retry_After="0")
    with misbehaving(HANG_UP, said({}, 503), busy, said(RUN)) as server, Client(server.url, "t", retries=QUICK) as c:
        run = c.submit({"name": "n"})
        keys = [asked.headers.get("idempotency-key") for asked in server.asked]
        bodies = {asked.body for asked in server.asked if asked.method == "POST"}
        assert len(set(keys[:4])) == 1
        assert keys[0]
        assert keys[4] is None  # the summary
        assert len(bodies) == 1
        run.pause()
        assert server.asked[-1].headers["idempotency-key"] not in keys


def test_a_repeated_submission_is_one_run(client, live, spec):
    """The first reply is lost on its way; the platform knows the key."""
    request = post("runs", {"spec": spec("once"), "project": live.project.name})
    lost = client._session.send(request)
    again = client._session.send(request)
    assert again.content == lost.content
    assert again.headers["Idempotency-Replayed"] == "true"
    assert len(list(client.runs("name:once"))) == 1


@pytest.mark.parametrize(
    ("status", "kind"), [(400, ApiError), (409, Conflict), (422, Refused), (500, ServerFault), (507, NoRoom)]
)
def test_a_refusal_stands(status, kind):
    with misbehaving(said({"detail": "no"}, status)) as server, Client(server.url, "t", retries=QUICK) as c:
        with pytest.raises(kind, match="no"):
            c.submit({"name": "n"})
        assert len(server.asked) == 1


def test_in_the_end_it_is_raised():
    few = Retries(most=2, first_s=0.01)
    with misbehaving(said({"detail": "busy"}, 503)) as server, Client(server.url, "t", retries=few) as c:
        with pytest.raises(ServerFault, match="busy"):
            c.get(7)
        assert len(server.asked) == 3
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1"), Client(server.url, "t", retries=few) as c:
        c.get(7)  # nobody listens there any more


def test_too_long_a_wait_is_not_waited_for():
    with misbehaving(said({}, 429, Retry_After="3600")) as server, Client(server.url, "t", retries=QUICK) as c:
        with pytest.raises(TooManyRequests) as refused:
            c.get(7)
        assert (refused.value.retry_after_s, len(server.asked)) == (3600, 1)


def test_other_servers_are_reported_as_not_the_platform():
    elsewhere = Answer(302, b"", {"Location": "https://sso.example.org/"})
    with misbehaving(elsewhere, Answer(200, b"<html>")) as server, Client(server.url, "secret", retries=QUICK) as c:
        with pytest.raises(NotThePlatform, match=r"sso\.example\.org"):
            c.get(7)
        assert len(server.asked) == 1  # the token goes nowhere else
        with pytest.raises(NotThePlatform, match="JSON"):
            c.get(7)


def test_problem_details_are_kept():
    told = {
        "type": "https://example.org/full",
        "title": "Full",
        "status": 422,
        "detail": "It is full.",
        "errors": [{"path": "a.b", "message": "is too small", "value": "1", "allowed": "2", "suggestion": None}, "odd"],
        "request_id": "r1",
        "term": "x",
    }
    with misbehaving(said(told, 422)) as server, Client(server.url, "t") as c, pytest.raises(Refused) as refused:
        c.get(7)
    error = refused.value
    assert (error.status, error.title, error.detail, error.type) == (422, "Full", "It is full.", "https://example.org/full")
    assert (error.errors[0].path, error.errors[0].allowed, len(error.errors)) == ("a.b", "2", 1)
    assert (error.request_id, error.more) == ("r1", {"term": "x"})
    assert str(error) == "422 Full: It is full.\n  a.b: is too small (given: 1; allowed: 2)\n  request id: r1"


def test_pauses_double_with_jitter_and_obey_the_platform():
    steady = Retries(first_s=1.0, longest_s=6.0, draw=lambda: 1.0)
    assert [steady.pause_s(tries) for tries in (1, 2, 3, 4, 400)] == [1, 2, 4, 6, 6]
    assert Retries(first_s=1.0, draw=lambda: 0.0).pause_s(1) == 0.5
    assert steady.pause_after(200, {}, 1) is None
    assert steady.pause_after(409, {}, 1) is None
    assert steady.pause_after(503, {"Retry-After": "7"}, 1) == 8
    now = datetime(2026, 11, 1, tzinfo=UTC)
    assert retry_after_s({"Retry-After": format_datetime(now + timedelta(seconds=9), usegmt=True)}, now) == 9
    assert [retry_after_s({"Retry-After": text}, now) for text in ("", "soon", "-1", "1.5", "9" * 40)] == [None] * 5
