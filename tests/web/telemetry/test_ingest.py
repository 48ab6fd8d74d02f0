"""Every event is applied exactly once, whatever the network does."""

import json
import threading

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oppo_contract.events import EVENT_ADAPTER
from oppo_platform.runs.models import Attempt, Run
from oppo_platform.telemetry import selectors
from oppo_platform.telemetry.ingest import SequenceGapError, ingest
from oppo_platform.telemetry.logs import logs
from oppo_platform.telemetry.models import HotPoints, LogLine, ProducerMark, SampleRow
from tests.web.event_factories import series_points
from tests.web.locks import wait_for_lock

SAMPLE = {"sequence_id": 1, "prompt": "<b>", "stale_response": "", "kl": 0.0, "length": 3, "age": 0, "versions": [0, 1]}


@pytest.fixture
def running(world):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    return world, worker, run, attempt_id


def points(run, key="m"):
    run.refresh_from_db()
    return series_points(run, key)


def stored(key):
    """Points of a metric in the database, each row's counted."""
    return sum(len(row.data) // 12 for row in HotPoints.objects.filter(series__key=key))


def log_event(seq, *lines):
    return {"kind": "log", "producer": "supervisor", "seq": seq, "time": 1.0, "stream": "supervisor", "lines": list(lines)}


def test_a_batch_is_applied_and_shown(running, events):
    _, worker, run, attempt_id = running
    cursor = run.cursor
    reply = worker.send_events(attempt_id, [events.started(1), events.step(2, 1, m=0.5, k=3.0), events.step(3, 2, m=0.75)])
    assert reply.json() == {"high_water": 3}
    assert points(run) == {1: 0.5, 2: 0.75}
    assert run.latest == {"m": 0.75, "k": 3.0}
    assert (run.step, run.elapsed_s, run.generated_tokens, run.cursor) == (2, 2.0, 200, cursor + 1)


def test_repeated_and_overlapping_batches_count_once(running, events):
    _, worker, run, attempt_id = running
    every = [events.step(i, i, m=float(i)) for i in range(1, 7)]
    assert worker.send_events(attempt_id, every[:3]).json()["high_water"] == 3
    assert worker.send_events(attempt_id, every[:3]).json()["high_water"] == 3
    assert worker.send_events(attempt_id, every[1:5]).json()["high_water"] == 5
    assert worker.send_events(attempt_id, every).json()["high_water"] == 6
    assert points(run) == {i: float(i) for i in range(1, 7)}
    assert stored("m") == 6


def test_a_gap_is_refused_and_nothing_applied(running, events):
    _, worker, run, attempt_id = running
    reply = worker.send_events(attempt_id, [events.step(2, 2, m=1.0)])
    assert (reply.status_code, reply.json()["expected_seq"]) == (409, 1)
    worker.send_events(attempt_id, [events.step(1, 1, m=1.0)])
    reply = worker.send_events(attempt_id, [events.step(2, 2, m=1.0), events.step(4, 4, m=1.0)])
    assert (reply.status_code, reply.json()["expected_seq"]) == (409, 3)
    assert points(run) == {1: 1.0}
    assert ProducerMark.objects.get().high_water == 1


def test_producers_are_numbered_separately(running, events):
    _, worker, run, attempt_id = running
    assert worker.send_events(attempt_id, [log_event(1, "one")], "supervisor").status_code == 200
    assert worker.send_events(attempt_id, [events.step(1, 1, m=1.0)]).status_code == 200
    assert worker.send_events(attempt_id, [log_event(2, "two\0", "three")], "supervisor").status_code == 200
    assert [line.text for line in LogLine.objects.order_by("pk")] == ["one", "two\ufffd", "three"]
    assert worker.send_events(attempt_id, [log_event(3, "x")], "engine").status_code == 422
    told = logs(run)
    assert [line["text"] for line in told["lines"]] == ["one", "two\ufffd", "three"]
    assert logs(run, after=told["next"])["lines"] == []


def test_senders_at_once_apply_each_event_once(running, events, at_once):
    _, _, run, attempt_id = running
    every = [EVENT_ADAPTER.validate_python(events.step(i, i, m=float(i))) for i in range(1, 41)]

    def sender(size):
        def send():
            sent = 0
            while sent < len(every):
                try:
                    sent = ingest(attempt_id, "engine", every[sent : sent + size])
                except SequenceGapError as gap:
                    sent = gap.expected_seq - 1

        return send

    assert at_once(sender(1), sender(3), sender(7), sender(40)) == [None] * 4
    assert points(run) == {i: float(i) for i in range(1, 41)}
    assert stored("m") == 40
    assert stored("@wall") == 40


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 6)), max_size=12))
def test_any_sequence_of_batches_leaves_a_prefix_applied_once(running, events, batches):
    _, _, run, attempt_id = running
    ProducerMark.objects.all().delete()
    HotPoints.objects.all().delete()
    applied = 0
    for start, size in batches:
        batch = [EVENT_ADAPTER.validate_python(events.step(i + 1, i + 1, m=float(i))) for i in range(start, start + size)]
        if start > applied:
            with pytest.raises(SequenceGapError) as gap:
                ingest(attempt_id, "engine", batch)
            assert gap.value.expected_seq == applied + 1
        else:
            applied = max(applied, start + size)
            assert ingest(attempt_id, "engine", batch) == applied
    assert list(points(run)) == list(range(1, applied + 1))
    assert stored("m") == applied


def test_telemetry_of_a_fenced_attempt_is_stored_without_changing_the_run(running, events, settings):
    world, worker, run, attempt_id = running
    worker.send_events(attempt_id, [events.step(1, 1, m=1.0)])
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed"})
    world.clock.advance(5)  # the back-off
    world.cycle()
    second = run.attempts.get(epoch=2)
    worker.claim(second.pk, 2)
    assert worker.send_events(attempt_id, [events.step(2, 2, m=2.0)]).status_code == 200
    run.refresh_from_db()
    assert (run.step, run.latest) == (1, {"m": 1.0})
    assert points(run) == {1: 1.0, 2: 2.0}


def test_metrics_of_an_older_attempts_devices_are_not_latest_values(running, events):
    world, worker, run, attempt_id = running
    told = {"bubble/cpu:0": 0.9, "busy/cpu:0": 0.1, "idle_s/cpu:0/decode": 9.0}
    worker.send_events(attempt_id, [events.step(1, 1, m=1.0, rare=5.0, **told)])
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed"})
    world.clock.advance(5)  # the back-off
    world.cycle()
    second = run.attempts.get(epoch=2)
    worker.claim(second.pk, 2)
    told = {"bubble/cuda:0": 0.2, "busy/cuda:0": 0.8, "idle_s/cuda:0/tail": 2.0}
    assert worker.send_events(second.pk, [events.step(1, 2, m=2.0, **told)]).status_code == 200
    run.refresh_from_db()
    assert run.bubble == 0.2
    assert run.latest == told | {"m": 2.0, "rare": 5.0, "bubble/cpu:0": None, "busy/cpu:0": None, "idle_s/cpu:0/decode": None}
    series = selectors.metrics(run, ["bubble/*"])["series"]
    assert {key: column["y"] for key, column in series.items()} == {"bubble/cpu:0": [0.9], "bubble/cuda:0": [0.2]}
    assert worker.send_events(second.pk, [events.step(2, 3, m=3.0)]).status_code == 200, (
        "without figures of devices nothing changes"
    )
    run.refresh_from_db()
    assert run.bubble == 0.2


def test_driver_metrics_of_a_previous_gpu_are_not_latest_values(running, events):
    world, worker, run, attempt_id = running
    first = {"busy/cuda:0": 0.5, "nvml/cuda:0/utilization": 0.9, "gpm/cuda:0/sm_util": 0.4}
    worker.send_events(attempt_id, [events.step(1, 1, **first), events.step(2, 2, **{"busy/cuda:0": 0.6})])
    run.refresh_from_db()
    assert run.latest == first | {"busy/cuda:0": 0.6}, "a step too short for the driver's figures leaves them as they were"
    worker.attempt(attempt_id, "outcome", {"epoch": 1, "outcome": "engine_died", "reason": "killed"})
    world.clock.advance(5)  # the back-off
    world.cycle()
    second = run.attempts.get(epoch=2)
    worker.claim(second.pk, 2)
    told = {"busy/n/cuda:0": 0.8, "nvml/n/cuda:0/utilization": 0.7}
    assert worker.send_events(second.pk, [events.step(1, 2, **told)]).status_code == 200
    run.refresh_from_db()
    assert run.latest == told | dict.fromkeys(first)


def test_non_finite_numbers_are_kept_and_shown_as_null(running, events):
    _, worker, run, attempt_id = running
    batch = [events.step(1, 1, m="NaN"), events.step(2, 2, m="-Infinity"), events.step(3, 3, m=1.0, other="Infinity")]
    assert worker.send_events(attempt_id, batch).status_code == 200
    told = selectors.metrics(Run.objects.get(), ["m"])
    assert told["series"]["m"]["y"] == [None, None, 1.0]
    assert Run.objects.get().latest == {"m": 1.0, "other": None}
    assert str(points(run)[1]) == "nan"


def test_samples_decisions_and_spans_survive_odd_values(running):
    _, worker, _, attempt_id = running
    sample = {**SAMPLE, "response": "a\0b", "score": "NaN"}
    envelope = {"producer": "engine", "time": 1.0, "step": 1}
    spans = {
        "window_s": [0.0, 1.0],
        "device": ["cpu:0"],
        "role": ["actor"],
        "phase": ["decode"],
        "start_s": [0.0],
        "end_s": ["NaN"],
    }
    spans |= {"chunk": [1], "rows": [2], "idle": [["cpu:0", "tail", 0.5, 1.0]], "deferred": []}
    batch = [
        {"kind": "samples", "seq": 1, "samples": [sample], **envelope},
        {"kind": "decision", "seq": 2, "controller": "chunk", "old": 8, "new": 16, "reason": "faster", **envelope},
        {"kind": "spans", "seq": 3, **spans, **envelope},
    ]
    assert worker.send_events(attempt_id, batch).status_code == 200
    assert SampleRow.objects.get().data["score"] is None
    assert SampleRow.objects.get().data["response"] == "a\ufffdb"


def test_oversized_step_is_refused_without_blocking_others(running):
    _, worker, _, attempt_id = running
    told = [
        ({"kind": "started", "devices": ["cpu:0"], "lanes": [], "total_steps": 3}, "start_step"),
        ({"kind": "samples", "samples": [{**SAMPLE, "response": "a", "score": 0.0}]}, "step"),
        ({"kind": "decision", "controller": "chunk", "old": 8, "new": 16, "reason": "faster"}, "step"),
    ]
    for seq, (event, key) in enumerate(told, start=1):
        event |= {"producer": "engine", "seq": seq, "time": 1.0}
        for step in (-1, 2**31):
            assert worker.send_events(attempt_id, [{**event, key: step}]).status_code == 422
        assert worker.send_events(attempt_id, [{**event, key: 0}]).status_code == 200


def test_limits(running, events):
    _, worker, _, attempt_id = running
    assert worker.send_events(attempt_id, []).status_code == 422
    assert worker.send_events(attempt_id, [events.step(i, i) for i in range(1, 1002)]).status_code == 422
    assert worker.send_events(attempt_id, [events.step(1, 2**40, m=1.0)]).status_code == 422
    for odd in (-1.0, 1e300, "NaN", "Infinity"):
        assert worker.send_events(attempt_id, [{**log_event(1, "x"), "time": odd}], "supervisor").status_code == 422
    huge = json.dumps({"producer": "supervisor", "events": [log_event(1, "x" * 4_300_000)]})
    assert worker.attempt(attempt_id, "events", huge).status_code == 413


def test_too_many_concurrent_batches_are_deferred(running, events, monkeypatch):
    from threading import BoundedSemaphore

    from oppo_platform.api import worker as worker_api

    _, worker, _, attempt_id = running
    slots = BoundedSemaphore(1)
    monkeypatch.setattr(worker_api, "_ingest_slots", slots)
    with slots:
        reply = worker.send_events(attempt_id, [events.step(1, 1, m=1.0)])
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "1")
    assert worker.send_events(attempt_id, [events.step(1, 1, m=1.0)]).status_code == 200


def test_a_batch_takes_the_runs_lock_before_anything_else(running, events):
    """Or it would hold the attempt and wait for the run, while a heartbeat does the opposite.

    And of two producers' lines the later ones could be seen first; who then reads on from the last line misses the earlier ones.
    """
    _, _, run, attempt_id = running
    batch = [EVENT_ADAPTER.validate_python(event) for event in (events.started(1), events.step(2, 1, m=1.0))]
    sender = threading.Thread(target=lambda: (ingest(attempt_id, "engine", batch), connection.close()))
    with transaction.atomic():
        Run.objects.select_for_update().get(pk=run.pk)
        sender.start()
        wait_for_lock()
        assert Attempt.objects.select_for_update(nowait=True).get(pk=attempt_id).engine_started_at is None
    sender.join(timeout=20)
    assert points(run) == {1: 1.0}


def test_dropped_events_appear_among_events_and_in_the_log(running):
    world, worker, run, attempt_id = running
    told = {"kind": "left_out", "producer": "engine", "seq": 1, "time": 1000.0, "from_step": 3, "to_step": 9}
    assert worker.send_events(attempt_id, [{**told, "timelines": 7, "answers": 14, "lines": 1}]).json() == {"high_water": 1}
    words = "The outbox was full: of steps 3 to 9, 7 timelines, 14 samples, 1 log line were dropped."
    item = world.login("vic").get(f"/api/v1/runs/{run.pk}/events?kinds=change").json()["items"][0]
    assert (item["what"], item["actor"]) == ("left out", "node:node1")
    assert item["text"].startswith(words)
    assert logs(run)["lines"][-1]["text"].startswith(words)
