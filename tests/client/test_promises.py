"""A success that is not what the platform answers is told in words, with its address and what is wrong; at every call."""

from __future__ import annotations

from datetime import datetime

import pytest

from oppo_client import Client, NotThePlatform, run_updates, validation
from oppo_client.validation import EACH, shape_error
from oppo_platform.api.openapi import examples
from tests.client.conftest import QUICK
from tests.client.misbehaving import HANG_UP, Answer, misbehaving, said, summary

PROMISED = {
    "who_am_i": validation.ME, "show_run": validation.RUN, "pause_run": validation.RUN, "submit_run": validation.CREATED,
    "fork_run": validation.CREATED, "list_runs": validation.page_of(validation.RUN), "show_logs": validation.LOGS,
    "list_samples": validation.page_of(validation.SAMPLE),
    "list_compared_samples": validation.page_of(validation.COMPARED_PROMPT),
    "list_checkpoints": validation.page_of(validation.CHECKPOINT), "show_queue": validation.page_of(validation.QUEUED),
    "show_metrics": validation.METRICS, "validate_spec": validation.VALIDATION, "show_timeline": validation.TIMELINE,
    "show_timeline_figure": validation.FIGURE, "compare_runs": validation.COMPARISON,
}  # fmt: skip
CALLS = {
    "me": lambda c, run: c.me(),
    "get": lambda c, run: c.get(7),
    "submit": lambda c, run: c.submit({"name": "n"}),
    "validate": lambda c, run: c.validate({"name": "n"}),
    "runs": lambda c, run: list(c.runs()),
    "queue": lambda c, run: c.queue(),
    "teams": lambda c, run: c.teams(),
    "alerts": lambda c, run: list(c.alerts()),
    "compare": lambda c, run: c.compare([7]),
    "compare_samples": lambda c, run: list(c.compare_samples([7])),
    "refresh": lambda c, run: run.refresh(),
    "pause": lambda c, run: run.pause(),
    "fork": lambda c, run: run.fork({"seed": 2}),
    "wait": lambda c, run: run.wait(),
    "metrics": lambda c, run: run.metrics("a"),
    "thinned": lambda c, run: run.metrics("a", max_points=10),
    "samples": lambda c, run: list(run.samples()),
    "logs": lambda c, run: list(run.logs()),
    "events": lambda c, run: list(run.events()),
    "provenance": lambda c, run: run.provenance(),
    "timeline": lambda c, run: run.timeline(),
    "checkpoints": lambda c, run: run.checkpoints(),
    "checkpoint": lambda c, run: run.checkpoint(),
}
PAGE = Answer(200, b"<html>Log in", {"Content-Type": "text/html; charset=utf-8"})
FILES = {
    "spec_yaml": lambda run: run.spec_yaml(),
    "spec_python": lambda run: run.spec_python(),
    "spec": lambda run: run.spec(),
    "trace": lambda run: run.trace(range(3)),
}
ODD = [PAGE, said({"ok": True}), said([]), said({"items": "none", "next": None}), said({"items": [3], "next": None})]


@pytest.mark.parametrize("answer", ODD)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_names_the_address_and_what_is_wrong(call, answer):
    with misbehaving(said(summary()), answer) as server, Client(server.url, "t", retries=QUICK) as c:
        run = c.get(7)
        with pytest.raises(NotThePlatform, match=r"does not respond like the platform \(.+\); check the URL") as told:
            CALLS[call](c, run)
        assert f"{server.url}/api/v1/" in str(told.value)
        assert run.state == "queued", "what was known before stays"


@pytest.mark.parametrize("call", FILES)
def test_a_page_is_no_file(call):
    with misbehaving(said(summary()), PAGE) as server, Client(server.url, "t", retries=QUICK) as c:
        run = c.get(7)
        with pytest.raises(NotThePlatform, match="text/html"):
            FILES[call](run)


def test_a_page_is_no_checkpoint(tmp_path):
    told = {"id": 1, "step": 1, "name": "c", "bytes": 1, "files": "here", "registered_at": "2026-11-01T12:00:00Z"}
    listed = said({"items": [{**told, "manifest_sha256": "0" * 64}], "next": None})
    with misbehaving(said(summary()), listed, PAGE) as server, Client(server.url, "t", retries=QUICK) as c:
        checkpoint = c.get(7).checkpoint()
        with pytest.raises(NotThePlatform, match="text/html"):
            checkpoint.download(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", [PAGE, Answer(200, b"id: 7:2\nevent: run\ndata: {}\n\n", {"Content-Type": "text/event-stream"})])
def test_a_page_is_no_stream(told):
    def decide(asked):
        return told if "/stream" in asked.path else said(summary("running"))

    with misbehaving(HANG_UP) as server, Client(server.url, "t", retries=QUICK) as c:
        server.decide = decide
        with pytest.raises(NotThePlatform, match=r"stream"):
            list(run_updates.iter_updates(c._session, [7]))


@pytest.mark.parametrize("operation", PROMISED)
def test_the_platform_keeps_what_the_client_takes_for_granted(operation):
    assert shape_error(examples()[operation]["reply"], PROMISED[operation]) is None


@pytest.mark.parametrize(
    ("value", "shape", "wrong"),
    [
        ({"a": 1, "more": 2}, {"a": int}, None),
        ([], dict, "it is a list, not an object"),
        (None, {"a": int}, "it is null, not an object"),
        ({}, {"a": {"b": str}}, "`a` is missing"),
        ({"a": {}}, {"a": {"b": str}}, "`a.b` is missing"),
        ({"a": {"b": 3}}, {"a": {"b": str | None}}, "`a.b` is a number, not a text or null"),
        ({"a": [{"b": "x"}, {"b": 1.5}]}, {"a": [{"b": str}]}, "`a.b` is a number, not a text"),
        ({"a": {"x": [1], "y": "2"}}, {"a": {EACH: list}}, "`a.y` is a text, not a list"),
        ({"at": "2026-11-01T12:00:00Z"}, {"at": datetime}, None),
        ({"at": "noon"}, {"at": datetime}, "`at` is a text, not a time"),
        ({"at": None}, {"at": datetime}, "`at` is null, not a time"),
    ],
)
def test_errors_name_the_problem(value, shape, wrong):
    assert shape_error(value, shape) == wrong
