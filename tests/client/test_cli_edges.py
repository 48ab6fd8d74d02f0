"""The commands where something is odd: what was typed, a file, who answers, who reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oppo_cli.main import main
from tests.client.misbehaving import HANG_UP, Answer, misbehaving, said, summary

SUMMARY = summary(id=1)
LINES = [{"id": n, "attempt": 1, "stream": "stdout", "text": "x" * 500, "time": "2026-01-01T00:00:00Z"} for n in range(1, 1001)]


@pytest.fixture
def oppo(monkeypatch):
    """Runs a command against a server: `oppo(server.url, "runs")`; yields what it printed, and what it said of errors."""
    monkeypatch.setenv("OPPO_TOKEN", "t")

    def run(url, *words, status=0, typed=None):
        monkeypatch.setenv("OPPO_URL", url)
        done = CliRunner().invoke(main, [str(word) for word in words], input=typed)
        assert done.exit_code == status, (done.output, done.exception)
        assert isinstance(done.exception, SystemExit | None)
        return done.stdout, done.stderr

    return run


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "spec.yaml"
    place.write_text("name: x")
    return place


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[" * 5000, "9" * 5000])
def test_values_outside_json_are_sent_as_typed(oppo, file, value):
    with misbehaving(said({"id": 1}), said(SUMMARY)) as server:
        oppo(server.url, "submit", file, "--set", f"ppo.learning_rate={value}")
    assert json.loads(server.asked[0].body) == {"yaml": "name: x", "changes": {"ppo.learning_rate": value}}


def test_a_spec_that_is_no_text_is_refused_in_words(oppo, tmp_path):
    place = tmp_path / "latin.yaml"
    place.write_bytes("name: é".encode("latin-1"))
    with misbehaving(said({})) as server:
        printed, words = oppo(server.url, "submit", place, "--json", status=2)
    assert (printed, "latin.yaml is not UTF-8 text" in words, server.asked) == ("", True, [])


def test_logging_in_tells_a_refusal_from_a_platform_that_is_not_there(oppo):
    assert "cannot be reached" in oppo("http://127.0.0.1:9", "login", "http://127.0.0.1:9", typed="tok\n", status=1)[1]
    fault = said({"title": "Internal Server Error", "detail": "\x1b]0;odd\x07"}, 500)
    with misbehaving(fault) as server:
        assert "\x1b" not in oppo(server.url, "login", server.url, typed="tok\n", status=1)[1]
    with misbehaving(said({"title": "Unauthorized"}, 401)) as server:
        oppo(server.url, "login", server.url, typed="tok\n", status=2)
    assert not Path(os.environ["OPPO_CONFIG"]).exists()


@pytest.mark.parametrize(
    "answer",
    [
        said([1, 2]),
        said(3),
        said(None),
        said({"ok": True}),
        Answer(status=204, body=b""),
        Answer(200, b"{}", {"Content-Type": "text/html"}),
    ],
)
@pytest.mark.parametrize("words", [("runs",), ("watch", 1), ("compare", 1), ("login",)])
def test_reply_of_another_server_is_reported(oppo, answer, words):
    with misbehaving(answer) as server:
        printed, told = oppo(server.url, *words, status=2, typed="tok\n")
    assert (printed, "check the URL" in told) == ("", True)


def test_invalid_run_number_cancels_nothing(oppo):
    def decide(asked):
        return said({"title": "Not Found"}, 404) if asked.path.endswith("/2") else said(SUMMARY)

    with misbehaving(said(SUMMARY)) as server:
        server.decide = decide
        oppo(server.url, "cancel", 1, 2, status=2)
    assert {asked.method for asked in server.asked} == {"GET"}


def _refuses_run_2(status):
    def decide(asked):
        number = int(asked.path.split("/runs/")[1].split("/")[0])
        if number == 2 and asked.method == "POST":
            return said({"title": "No", "detail": "Not yours."}, status)
        return said(summary("cancelled" if asked.method == "POST" else "running", id=number))

    return decide


@pytest.mark.parametrize(("status", "ends"), [(403, 2), (409, 2), (500, 1)])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_run_that_may_not_be_cancelled_does_not_keep_the_others(oppo, status, ends, more):
    with misbehaving(said(SUMMARY)) as server:
        server.decide = _refuses_run_2(status)
        printed, words = oppo(server.url, "cancel", 1, 2, 3, *more, status=ends)
    done = [run["id"] for run in json.loads(printed)] if more else [int(line.split()[1]) for line in printed.splitlines()]
    assert done == [1, 3]
    assert "Run 2 was not cancelled: " in words
    assert "Not yours." in words
    assert "Run 1" not in words


def test_a_platform_that_goes_away_amid_cancelling_is_told_with_what_is_left(oppo, monkeypatch):
    from oppo_client import Retries, client

    monkeypatch.setattr(client, "Retries", lambda: Retries(most=0))
    with misbehaving(said(SUMMARY)) as server:
        decide = _refuses_run_2(403)
        server.decide = lambda asked: HANG_UP if asked.path.endswith("/2/cancel") else decide(asked)
        printed, words = oppo(server.url, "cancel", 1, 2, 3, status=1)
    assert len(printed.splitlines()) == 1
    assert "Run 2 was not cancelled" in words
    assert "Run 3 was not cancelled" in words


@pytest.mark.parametrize("more", ["", "--json"])
def test_a_reader_that_leaves_is_no_failure_to_tell_of(more):
    def decide(asked):
        return said({"lines": LINES, "next": 1000, "earlier": False, "ended": False}) if "/logs" in asked.path else said(SUMMARY)

    with misbehaving(said(SUMMARY)) as server:
        server.decide = decide
        environ = {**os.environ, "OPPO_URL": server.url, "OPPO_TOKEN": "t"}
        command = f"{sys.executable} -m oppo_cli logs 1 {more} | head -c 100"
        done = subprocess.run(["sh", "-c", command], env=environ, capture_output=True, timeout=60, check=True)
    assert (len(done.stdout), done.stderr) == (100, b"")
