"""Waiting, watching and following: by the live stream, and by asking where the stream cannot be had."""

from __future__ import annotations

import io
import json
import threading
import time
from types import SimpleNamespace

import pytest

from oppo_client import Client, RunFailed, Unreachable, WaitTimeout, pagination, run_updates
from oppo_client.sse import ServerEvent
from tests.client.conftest import QUICK
from tests.client.misbehaving import HANG_UP, Answer, misbehaving, said, summary


class Beside:
    """A function in a thread, whose errors come out when it is joined."""

    def __init__(self, function):
        self.result = self.error = None
        self.thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self.thread.start()

    def _run(self, function):
        try:
            self.result = function()
        except Exception as error:  # noqa: BLE001  # it comes out when it is joined
            self.error = error

    def join(self):
        """What the function returned."""
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


class Paper(io.StringIO):
    """A file that tells when something stands in it."""

    def __init__(self, tty=False):
        super().__init__()
        self.tty, self.news = tty, threading.Condition()

    def isatty(self):
        return self.tty

    def write(self, text):
        with self.news:
            self.news.notify_all()
            return super().write(text)

    def wait_for(self, words):
        """Return when these words are there."""
        with self.news:
            assert self.news.wait_for(lambda: words in self.getvalue(), timeout=30), self.getvalue()


@pytest.mark.parametrize("tty", [True, False])
def test_watching_follows_a_run_to_its_end_by_the_stream(client, live, spec, tty, monkeypatch):
    monkeypatch.setattr(run_updates, "POLL_INTERVAL_S", 1000.0)  # who asks again comes too late
    run = client.submit(spec("watched", steps=6))
    paper = Paper(tty)
    watching = Beside(lambda: run.watch(paper))
    paper.wait_for("queued")
    supervisor, story = live.start(run.id)
    paper.wait_for("running")
    supervisor.tell(list(story.tell(6)))
    supervisor.tell(story.end())
    supervisor.end("succeeded", "All steps are done.")
    assert watching.join() is run
    assert run.state == "succeeded"
    assert "succeeded · step 6/6 · reward" in paper.getvalue()
    assert ("\r\x1b[2K" in paper.getvalue(), paper.getvalue().endswith(f"\n{run.url}\n")) == (tty, tty)


def test_names_cannot_move_the_terminals_cursor(client, live, spec):
    run = client.submit(spec("a b"))
    run.summary["name"] = "evil\x1b[2J\nname"
    assert "\x1b" not in run.line()
    assert "\n" not in run.line()


def test_waiting_ends_with_the_run_or_in_time(client, live, spec):
    run = client.submit(spec("waited for", steps=5))
    with pytest.raises(WaitTimeout, match=r"has not ended within 0\.2 s"):
        run.wait(timeout=0.2)
    supervisor, story = live.start(run.id)
    waiting = Beside(lambda: client.get(run.id).wait(timeout=60))
    checked = Beside(lambda: client.get(run.id).wait(check=True))
    supervisor.tell(list(story.tell(2)))
    supervisor.end("failed", "it broke")
    assert waiting.join().state == "failed"
    with pytest.raises(RunFailed, match="it broke"):
        checked.join()


def test_following_a_log_ends_with_the_run(client, live, spec):
    run = client.submit(spec("chatty", steps=5))
    seen = Paper()

    def follow():
        for line in run.logs(follow=True):
            seen.write(f"{line}\n")

    following = Beside(follow)
    supervisor, story = live.start(run.id)
    seen.wait_for("loading the actor")
    supervisor.tell(list(story.tell(5)))
    seen.wait_for("step 5 of 5")
    supervisor.end("succeeded")
    following.join()
    assert seen.getvalue().count("step 3 of 5") == 1


def test_a_line_comes_as_soon_as_it_is_written(client, live, spec, monkeypatch):
    monkeypatch.setattr(pagination, "LOG_PAUSE_S", 1000.0)  # who asks again comes too late
    run = client.submit(spec("quiet", steps=5))
    lines = run.logs(follow=True)
    following = Beside(lambda: str(next(lines)))
    live.start(run.id)
    assert "loading the actor" in following.join()
    lines.close()


def test_following_asks_once_for_as_long_as_nothing_comes():
    line = {"id": 3, "attempt": 1, "stream": "stderr", "text": "at last", "time": "2026-11-01T12:00:00+00:00"}
    page = {"lines": [], "next": 0, "earlier": False, "ended": False}
    replies = iter([page, page, {**page, "lines": [line], "next": 3, "ended": True}])
    with misbehaving(HANG_UP) as server, Client(server.url, "t", retries=QUICK) as c:
        server.decide = lambda asked: said(next(replies) if "/logs" in asked.path else summary("running", 1))
        assert [str(line) for line in c.get(7).logs(follow=True)] == ["at last"]
    assert [asked.path.partition("?")[2] for asked in server.asked[2:]] == ["after=0&limit=1000&wait=25"] * 2


def test_where_the_stream_cannot_be_had_the_client_asks(monkeypatch):
    monkeypatch.setattr(run_updates, "POLL_INTERVAL_S", 0.01)
    states = iter([summary("running", n) for n in (1, 1, 2, 3)] + [summary("succeeded", 4)] * 9)

    def decide(asked):
        return Answer(502, b"<html>bad gateway") if "/stream" in asked.path else said(next(states))

    with misbehaving(HANG_UP) as server, Client(server.url, "t", retries=QUICK) as c:
        server.decide = decide
        heard = list(run_updates.iter_updates(c._session, [7]))
    assert [told["cursor"] for told in heard] == [1, 2, 3, 4]
    assert 1 <= sum("/stream" in asked.path for asked in server.asked) <= 3  # ever more seldom


def test_a_stream_that_breaks_off_goes_on_where_it_was():
    frame = f"id: 7:2\nevent: run\ndata: {json.dumps(summary('running', 2))}\n\n: still here\n\n"
    last = f"id: 7:3\nevent: run\ndata: {json.dumps(summary('succeeded', 3))}\n\n"
    kind = {"Content-Type": "text/event-stream"}
    streams = iter([Answer(200, frame.encode(), kind, cut=len(frame) - 3), Answer(200, last.encode(), kind)])

    def decide(asked):
        return next(streams) if "/stream" in asked.path else said(summary("running", 1))

    with misbehaving(HANG_UP) as server, Client(server.url, "t", retries=QUICK) as c:
        server.decide = decide
        heard = list(run_updates.iter_updates(c._session, [7]))
    assert [told["cursor"] for told in heard] == [1, 2, 3]
    asked = [asked.path for asked in server.asked if "/stream" in asked.path]
    assert "cursor=7%3A1" in asked[0]
    assert "cursor=7%3A2" in asked[1]


@pytest.mark.parametrize("sign", [ServerEvent("comment", ""), None], ids=["a ping", "the stream's end"])
def test_a_run_that_is_quiet_for_long_is_no_platform_that_is_away(sign, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(run_updates, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Stream:
        """Each event comes after 15 s, for twice the permitted outage; then the platform restarts."""

        def next(self, request):
            if clock.now >= 2 * run_updates.MAX_OUTAGE_S:
                raise Unreachable("restarting")
            clock.now += 15
            return sign

        def close(self):
            """Nothing to close."""

    replies = iter([summary("running", 1), summary("succeeded", 2)])
    session = SimpleNamespace(retries=QUICK, events=Stream, sleep=lambda seconds: None, json=lambda request, shape: next(replies))
    updates = list(run_updates.iter_updates(session, [7]))
    assert [update["state"] for update in updates] == ["running", "succeeded"]  # by polling after the failed stream


def test_a_platform_that_stays_away_is_given_up(monkeypatch):
    monkeypatch.setattr(run_updates, "POLL_INTERVAL_S", 0.01)
    with misbehaving(HANG_UP) as server, Client(server.url, "t", retries=QUICK) as c:
        began = time.monotonic()
        with pytest.raises(Unreachable):
            list(run_updates.iter_updates(c._session, [7], max_outage_s=0.5))
        assert time.monotonic() - began < 20
