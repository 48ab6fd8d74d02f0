"""Every point of a run as newline-delimited JSON."""

import json

import pytest

from oppo_platform.telemetry import metric_export
from oppo_platform.telemetry.compaction import compact


@pytest.fixture
def told(world, events):
    """(run, attempt, get): a run of nine steps, of which every third has another metric; `get` asks the API as vic, a viewer."""
    worker = world.worker()
    run, attempt_id = world.start(worker)
    odd = {3: {"b/x": 1.5}, 6: {"b/x": "nan"}, 9: {"b/x": 2.5}}
    batch = [events.started(1)] + [events.step(n + 1, n, **{"a": n / 10, **odd.get(n, {})}) for n in range(1, 10)]
    assert worker.send_events(attempt_id, batch).status_code == 200
    client = world.login("vic")

    def get(keys, **query):
        reply = client.get(f"/api/v1/runs/{run.pk}/metrics.ndjson", {"keys": keys, **query})
        assert (reply.status_code, reply.headers["Content-Type"]) == (200, "application/x-ndjson")
        with pytest.warns(Warning, match="consume asynchronous"):  # a test's client has no event loop
            return [json.loads(line) for line in b"".join(reply).splitlines()]

    return run, attempt_id, get


def test_a_step_is_a_line_with_every_axis(told, monkeypatch):
    monkeypatch.setattr(metric_export, "STEPS_A_READ", 4)
    _, attempt_id, get = told
    lines = get("a,b/*")
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[2] == {"step": 3, "wall": 3.0, "tokens": 300.0, "gpu_seconds": 3.0, "a": 0.3, "b/x": 1.5}
    assert "b/x" not in lines[1]
    assert lines[5]["b/x"] is None
    compact(attempt_id)
    assert get("a,b/*") == lines


def test_export_of_selected_keys_and_steps(told):
    get = told[-1]
    assert [line["step"] for line in get("b/x")] == [3, 6, 9]
    assert [line["step"] for line in get("a", since_step=2, to_step=5)] == [3, 4, 5]
    assert get("a", since_step=9) == get("nothing") == []
