"""The timeline from afar: merged spans keep every total, the worst bubbles are found, and a thousand steps come in one reply."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_platform.telemetry.models import SpanBatch
from oppo_platform.telemetry.overlap_savings import overlap_savings
from oppo_platform.telemetry.timeline_downsampling import (
    MOST_PIECES,
    StoredStep,
    merged_steps,
    pack_downsampled,
    unpack_downsampled,
    worst_bubbles,
)
from oppo_platform.telemetry.timelines import timeline

DEVICES = ["cuda:0", "cuda:1", "cuda:2"]
ROLES, PHASES, CAUSES = ["actor", "critic"], ["decode", "score", "update-actor"], ["decode", "tail", "update"]
TIMES = st.tuples(st.floats(0, 100), st.floats(0, 10)).map(lambda t: (t[0], t[0] + t[1]))
WORK = st.tuples(st.sampled_from(DEVICES), st.sampled_from(ROLES), st.sampled_from(PHASES), TIMES)
IDLE = st.tuples(st.sampled_from(DEVICES), st.sampled_from(CAUSES), TIMES)
STEP = st.tuples(st.lists(WORK, max_size=8), st.lists(IDLE, max_size=8))


def spans_of(work, idle, window=(0.0, 200.0)):
    columns = {"device": [w[0] for w in work], "role": [w[1] for w in work], "phase": [w[2] for w in work]}
    times = {"start_s": [w[3][0] for w in work], "end_s": [w[3][1] for w in work]}
    return {**columns, **times, "window_s": list(window), "idle": [[d, cause, *t] for d, cause, t in idle]}


def totals(steps):
    """Seconds by device and kind, by brute force over spans."""
    found = Counter()
    for step in steps:
        for device, role, phase, a, b in zip(*(step[n] for n in ("device", "role", "phase", "start_s", "end_s")), strict=True):
            found[device, role, phase] += b - a
        for device, cause, a, b in step["idle"]:
            found[device, cause] += b - a
    return found


@settings(deadline=None, max_examples=60)
@given(st.lists(STEP, min_size=1, max_size=12), st.integers(27, 60), st.floats(0, 1e6))
def test_merged_spans_keep_the_totals_of_every_phase_and_cause(told, most, shift):
    raw = [spans_of(*step) for step in told]
    far = unpack_downsampled([StoredStep(i, pack_downsampled(spans), shift) for i, spans in enumerate(raw, start=1)])
    merged = merged_steps(far, most)
    assert dict(totals(merged)) == pytest.approx(dict(totals(raw)), rel=1e-6, abs=1e-6)
    assert sum(len(step["device"]) + len(step["idle"]) for step in merged) <= most
    assert [step["step"] for step in merged[1:]] == [step["to_step"] + 1 for step in merged[:-1]]
    assert sum(step["window_s"][1] - step["window_s"][0] for step in merged) == pytest.approx(200.0 * len(raw))
    bubbles = sorted((b - a for spans in raw for _, _, a, b in spans["idle"]), reverse=True)
    assert [bubble["length_s"] for bubble in worst_bubbles(far)] == pytest.approx(bubbles[:10])


def test_pieces_of_a_lane_do_not_overlap_and_idle_time_ends_the_step():
    spans = spans_of(
        [("cuda:0", "actor", "decode", (0.0, 4.0)), ("cuda:0", "actor", "update-actor", (6.0, 9.0))],
        [("cuda:0", "tail", (4.0, 6.0)), ("cuda:0", "update", (9.0, 10.0))],
        window=(0.0, 10.0),
    )
    (step,) = merged_steps(unpack_downsampled([StoredStep(n, pack_downsampled(spans), 5.0) for n in (1, 2)]), most=4)
    assert (step["step"], step["to_step"], step["merged"], step["window_s"]) == (1, 2, 2, [5.0, 25.0])
    assert list(zip(step["phase"], step["start_s"], step["end_s"], strict=True)) == [
        ("decode", 5.0, 13.0),
        ("update-actor", 13.0, 19.0),
    ]
    assert step["idle"] == [["cuda:0", "tail", 19.0, 23.0], ["cuda:0", "update", 23.0, 25.0]]


def test_times_that_are_not_finite_are_left_out():
    spans = spans_of([("cuda:0", "actor", "decode", (0.0, 1.0))], [("cuda:0", "tail", (1.0, 2.0))])
    spans |= {"end_s": [None], "window_s": [None, 3.0]}
    far = unpack_downsampled([StoredStep(1, pack_downsampled(spans), 0.0)])
    assert totals(merged_steps(far)) == {("cuda:0", "tail"): 1.0}


def test_a_thousand_steps_come_in_one_reply(world, events):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    worker.send_events(attempt_id, [events.started(1), events.step(2, 1, m=1.0)])
    phases = ["decode", "score", "update-actor", "update-critic"]
    work = [(f"cuda:{d}", "actor", phase, (float(i), i + 1.0)) for d in range(8) for i, phase in enumerate(phases)]
    spans = spans_of(work, [(f"cuda:{d}", cause, (4.0, 5.0)) for d in range(8) for cause in CAUSES], window=(0.0, 5.0))
    worst = spans_of(work, [("cuda:3", "tail", (4.0, 99.0))], window=(0.0, 5.0))
    stored = {n: worst if n == 700 else spans for n in range(1, 1001)}
    packed = {id(told): pack_downsampled(told) for told in (spans, worst)}
    SpanBatch.objects.bulk_create(
        SpanBatch(attempt_id=attempt_id, step=n, data={}, far=packed[id(told)]) for n, told in stored.items()
    )
    told = timeline(run, 1, 1000)
    assert (told["far"], told["first_step"], told["last_step"]) == (True, 1, 1000)
    assert dict(totals(told["steps"])) == pytest.approx(dict(totals(stored.values())))
    assert sum(len(step["device"]) + len(step["idle"]) for step in told["steps"]) <= MOST_PIECES
    assert told["worst"][0] == {
        "device": "cuda:3", "cause": "tail", "step": 700, "start_s": 4.0, "length_s": 95.0,
        "words": "cuda:3 was idle for 95 s in step 700, 4 s after the run started. Cause: tail.",
    }  # fmt: skip
    assert len(told["worst"]) == 10


def test_rows_stored_before_are_filled_by_the_migration(world, events):
    from importlib import import_module

    from django.apps import apps

    _, attempt_id = world.start(world.worker())
    spans = spans_of([("cuda:0", "actor", "decode", (0.0, 1.0))], [])
    SpanBatch.objects.bulk_create(SpanBatch(attempt_id=attempt_id, step=n, data=spans, far=b"") for n in range(1, 103))
    import_module("oppo_platform.telemetry.migrations.0005_spans_from_afar").fill(apps, None)
    assert {bytes(row.far) for row in SpanBatch.objects.all()} == {pack_downsampled(spans)}


def test_some_steps_are_downloaded_as_a_chrome_trace(world, events):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    rest = {"producer": "engine", "kind": "spans", "time": 1.0, "chunk": [1], "rows": [2], "deferred": []}
    told = [events.started(1, time=1000.0), events.step(2, 1, m=1.0)]
    for n in (1, 2, 3):
        window = (float(n), n + 1.0)
        spans = spans_of([("cuda:0", "actor", "decode", window)], [("cuda:1", "tail", window)], window)
        told.append(rest | spans | {"seq": n + 2, "step": n})
    worker.send_events(attempt_id, told)
    SpanBatch.objects.filter(step=3).update(data=SpanBatch.objects.get(step=3).data | {"end_s": [None]})
    client, url = world.login("ada"), f"/api/v1/runs/{run.pk}/trace.json"
    reply = client.get(url, {"from_step": 2, "to_step": 3})
    assert f'filename="run-{run.pk}-steps-2-3.trace.json"' in reply.headers["Content-Disposition"]
    drawn = [(e["name"], e["ts"], e["dur"]) for e in reply.json()["traceEvents"] if e["ph"] == "X"]
    # What has no finite time cannot be drawn.
    assert sorted(drawn) == [("decode", 2_000_000, 1_000_000), ("step 2", 2_000_000, 1_000_000), ("tail", 2_000_000, 1_000_000)]
    nothing = client.get(url, {"from_step": 7, "to_step": 9})
    assert (nothing.status_code, nothing.json()["detail"][:30]) == (422, "There is no recorded step from")
    assert world.login("eve").get(url, {"from_step": 1, "to_step": 3}).status_code == 404


@pytest.mark.parametrize(("devices", "sequential"), [(["cuda:0", "cuda:1", "cuda:2"], 9.0), (["cpu:0", "cpu:1", "cpu:1"], 8.0)])
def test_saving_is_the_sequential_sum_of_stages_minus_the_measured_time(world, events, devices, sequential):
    worker = world.worker()
    run, attempt_id = world.start(worker)
    assert overlap_savings(run) == {"steps": 0, "measured_s": 0.0, "sequential_s": 0.0, "saved_s": 0.0}
    worker.send_events(attempt_id, [events.started(1), events.step(2, 1, m=1.0)])
    run.refresh_from_db()
    # Scoring overlaps decoding; the longer of two scorers on different devices counts, and the two updates share the time. On two
    # cores both work on what is not decoding.
    work = [
        (devices[0], "actor", "decode", (0.0, 4.0)),
        (devices[1], "reward", "reward-prefill", (1.0, 3.0)),
        (devices[2], "critic", "critic-prefill", (1.0, 2.0)),
        (devices[0], "actor", "update-actor", (4.0, 7.0)),
        (devices[2], "critic", "update-critic", (4.0, 6.0)),
    ]
    packed = pack_downsampled(spans_of(work, [(devices[1], "update", (4.0, 7.0))], window=(0.0, 7.5)))
    SpanBatch.objects.bulk_create(SpanBatch(attempt_id=attempt_id, step=n, data={}, far=packed) for n in range(1, 1501))
    told = overlap_savings(run)
    assert (told["steps"], told["measured_s"], told["sequential_s"]) == (750, 750 * 7.5, 750 * sequential)
    assert told["saved_s"] == pytest.approx(run.elapsed_s * (sequential / 7.5 - 1))
