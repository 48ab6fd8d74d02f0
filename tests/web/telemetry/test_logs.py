"""Log lines over the API: the end, what came since, what stood before, search, and the whole as text."""

from __future__ import annotations

import pytest

from oppo_platform.telemetry.models import LogLine


def log_event(seq, stream, *lines):
    return {"kind": "log", "producer": "engine", "seq": seq, "time": 1_700_000_000.5, "stream": stream, "lines": list(lines)}


@pytest.fixture
def told(world):
    """(world, run, worker, attempt id, get): a run with nine lines of two streams; `get` asks the API as vic, a viewer."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    batch = [log_event(1, "stderr", *(f"step {i}" for i in range(1, 7))), log_event(2, "stdout", "100% Öl", "<b>", "step 7 Done")]
    assert worker.send_events(attempt_id, batch).status_code == 200
    client = world.login("vic")

    def get(**query):
        return client.get(f"/api/v1/runs/{run.pk}/logs", query)

    return world, run, worker, attempt_id, get


def texts(reply):
    return [line["text"] for line in reply.json()["lines"]]


def test_last_lines_then_newer_and_earlier_ones(told):
    *_, worker, attempt_id, get = told
    newest = get(limit=3)
    assert (texts(newest), newest.json()["earlier"]) == (["100% Öl", "<b>", "step 7 Done"], True)
    line = newest.json()["lines"][0]
    assert (line["stream"], line["attempt"], line["time"][:19]) == ("stdout", 1, "2023-11-14T22:13:20")
    before = get(limit=10, before=line["id"])
    assert (texts(before), before.json()["earlier"]) == ([f"step {i}" for i in range(1, 7)], False)
    assert texts(get(after=line["id"])) == ["<b>", "step 7 Done"]
    begun = get(after=0, limit=2)
    assert (texts(begun), begun.json()["earlier"]) == (["step 1", "step 2"], False)
    assert texts(get(after=begun.json()["next"], limit=1)) == ["step 3"]
    at = newest.json()["next"]
    assert (texts(get(after=at)), get(after=at).json()["next"]) == ([], at)
    worker.send_events(attempt_id, [log_event(3, "stderr", "one more")])
    assert texts(get(after=at)) == ["one more"]


def test_search_and_stream(told):
    get = told[-1]
    assert texts(get(q="STEP", stream="stdout")) == ["step 7 Done"]
    assert texts(get(q="öl 100%")) == ["100% Öl"]
    assert texts(get(q='"step 7"')) == texts(get(q="done")) == ["step 7 Done"]
    assert texts(get(q="%")) == ["100% Öl"]
    assert get(q="step", limit=2).json()["earlier"] is True
    assert texts(get(q="\0")) == []
    for query in ({"stream": "x"}, {"after": -1}, {"before": 2**63}, {"q": "x" * 1001}):
        assert get(**query).status_code == 422, query


def test_the_whole_log_is_text(told, monkeypatch):
    world, run, *_ = told
    monkeypatch.setattr("oppo_platform.telemetry.logs.LINES_A_READ", 4)
    path = f"/api/v1/runs/{run.pk}/logs.txt"
    with pytest.warns(Warning, match="consume asynchronous"):  # a test's client has no event loop
        content = b"".join(world.login("vic").get(path)).decode()
    assert content.splitlines()[0] == "2023-11-14T22:13:20.500+00:00 1 stderr step 1"
    assert [line.split(" ", 3)[3] for line in content.splitlines()] == list(
        LogLine.objects.order_by("pk").values_list("text", flat=True)
    )
    assert world.login("eve").get(path).status_code == 404


def test_another_teams_log_does_not_exist(told):
    world, run, *_ = told
    eve = world.login("eve")
    assert eve.get(f"/api/v1/runs/{run.pk}/logs").status_code == 404
    assert eve.get(f"/runs/{run.pk}/logs").status_code == 404
