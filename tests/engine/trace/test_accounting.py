"""Busy and idle fill every window, each idle second has a cause, and real runs leave next to nothing unexplained."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oppo_contract.events import IdleCause, Phase
from oppo_core.trace.accounting import CAUSE_OF, busy_shares, flattened, gaps, idle_by_cause, idle_times, union
from oppo_core.trace.recorder import Recorder, Span, Wait
from oppo_core.trace.step_trace import StepTrace, handovers, live_rows, waiting_handovers

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
WINDOW = (10.0, 30.0)
TAIL_ROWS = 2
MANY = settings(max_examples=200, deadline=None)
# A coarse grid makes touching and equal edges common.
TIME = st.integers(0, 80).map(lambda n: n / 2)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[float, float]:
    start = draw(TIME)
    return start, start + draw(st.integers(0, 20)) / 2


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, end = draw(intervals())
    devices = tuple(sorted(draw(st.sets(st.sampled_from(DEVICES), min_size=1))))
    return Span(devices, "actor", draw(st.sampled_from(get_args(Phase))), start, end, rows=draw(st.integers(0, 5)))


@st.composite
def waits(draw: st.DrawFn) -> Wait:
    start, end = draw(intervals())
    return Wait((draw(st.sampled_from(DEVICES)),), draw(st.sampled_from(["score", "update"])), start, end)


def instants() -> list[float]:
    """One point in each cell of the grid within the window."""
    return [WINDOW[0] + 0.25 + n / 2 for n in range(int(2 * (WINDOW[1] - WINDOW[0])))]


@MANY
@given(pieces=st.lists(intervals(), max_size=12))
def test_union_and_gaps_part_the_window(pieces: list[tuple[float, float]]) -> None:
    busy = union(pieces, WINDOW)
    free = gaps(busy, WINDOW)
    edges = sorted(busy + free)
    assert [a for a, _ in edges] == [WINDOW[0], *(b for _, b in edges[:-1])]
    assert edges[-1][1] == WINDOW[1]
    assert all(a < b for a, b in edges)
    for t in instants():
        assert any(a <= t < b for a, b in busy) == any(a <= t < b for a, b in pieces)
    assert all(one[1] < other[0] for one, other in pairwise(busy)), "touching pieces should be one"


@MANY
@given(work=st.lists(spans(), max_size=10), still=st.lists(waits(), max_size=4))
def test_busy_and_idle_fill_the_window_of_every_device(work: list[Span], still: list[Wait]) -> None:
    idle = idle_times(DEVICES, work, still, WINDOW, TAIL_ROWS)
    shares = busy_shares(idle, DEVICES, WINDOW)
    length = WINDOW[1] - WINDOW[0]
    sums = idle_by_cause(idle)
    for device in DEVICES:
        seconds = sum(s for (d, _), s in sums.items() if d == device)
        busy = sum(b - a for a, b in union([(s.start, s.end) for s in work if device in s.devices], WINDOW))
        assert busy + seconds == pytest.approx(length)
        assert shares[device] == pytest.approx(busy / length)
        own = sorted((i.start, i.end) for i in idle if i.device == device)
        assert all(one[1] <= other[0] for one, other in pairwise(own))
        for t in instants():
            works = any(device in s.devices and s.start <= t < s.end for s in work)
            assert sum(a <= t < b for a, b in own) == (0 if works else 1)


@MANY
@given(work=st.lists(spans(), max_size=10), still=st.lists(waits(), max_size=4))
def test_every_idle_moment_has_the_cause_of_its_moment(work: list[Span], still: list[Wait]) -> None:
    """A device's own wait decides; else what somebody else did just then; else what others waited for; else it is unknown."""
    for piece in idle_times(DEVICES, work, still, WINDOW, TAIL_ROWS):
        for t in (t for t in instants() if piece.start <= t < piece.end):
            own = {w.cause for w in still if piece.device in w.devices and w.start <= t < w.end}
            others = {cause_of(s) for s in work if s.start <= t < s.end}
            waited = {w.cause for w in still if w.start <= t < w.end}
            assert piece.cause in (own or others or waited or {"unknown"})


def cause_of(span: Span) -> str:
    return "tail" if span.phase == "decode" and span.rows <= TAIL_ROWS else CAUSE_OF[span.phase]


def test_every_phase_has_a_cause_and_a_tail_is_no_plain_decoding() -> None:
    assert set(CAUSE_OF) == set(get_args(Phase))
    assert set(CAUSE_OF.values()) <= set(get_args(IdleCause))
    work = [
        Span(("cpu:0",), "actor", "decode", 10, 15, rows=3),
        Span(("cpu:0",), "actor", "decode", 15, 20, rows=TAIL_ROWS),
        Span(("cpu:0",), "actor", "checkpoint", 20, 24),
    ]
    found = [(i.device, i.cause, i.start, i.end) for i in idle_times(DEVICES[:2], work, [], WINDOW, TAIL_ROWS)]
    assert found == [
        ("cpu:0", "unknown", 24, 30),
        ("cpu:1", "decode", 10, 15),
        ("cpu:1", "tail", 15, 20),
        ("cpu:1", "checkpoint", 20, 24),
        ("cpu:1", "unknown", 24, 30),
    ]


def test_a_recorder_tells_which_cores_worked_even_when_the_work_fails() -> None:
    trace = Recorder(("cpu:0", "cpu:1"))
    with pytest.raises(ZeroDivisionError), trace.span("actor", "decode", chunk=3, rows=4):
        _ = 1 / 0
    trace.devices = ("cpu:0",)
    with trace.wait("score"):
        pass
    work, still = trace.take()
    assert [(s.devices, s.phase, s.chunk, s.rows) for s in work] == [(("cpu:0", "cpu:1"), "decode", 3, 4)]
    assert [(w.devices, w.cause) for w in still] == [(("cpu:0",), "score")]
    assert work[0].start <= work[0].end <= still[0].start <= still[0].end
    assert trace.take() == ([], [])


@MANY
@given(reasons=st.lists(st.tuples(TIME, TIME, st.sampled_from(get_args(IdleCause))), max_size=10))
def test_of_several_causes_the_first_one_given_counts(reasons: list[tuple[float, float, IdleCause]]) -> None:
    flat = flattened(reasons)
    assert all(a < b for a, b, _ in flat)
    assert all(one[1] <= other[0] for one, other in pairwise(flat))
    for t in instants():
        first = next((cause for a, b, cause in reasons if a <= t < b), None)
        assert next((cause for a, b, cause in flat if a <= t < b), None) == first


def test_many_devices_are_explained_like_each_of_them_alone() -> None:
    devices = [f"cpu:{n}" for n in range(64)]
    actor, scorers = tuple(devices[:32]), tuple(devices[32:])
    work = [Span(actor, "actor", "decode", 10, 20, rows=9), Span(scorers, "reward", "reward-prefill", 18, 25)]
    still = [Wait(actor, "score", 20, 26)]
    together = idle_times(devices, work, still, WINDOW, TAIL_ROWS)
    assert sorted(together) == sorted(i for d in devices for i in idle_times([d], work, still, WINDOW, TAIL_ROWS))


def test_a_recorder_runs_on_the_clock_that_it_is_given() -> None:
    ticks = iter([1.0, 2.5, 7.0, 7.25])
    trace = Recorder(("cpu:0",), clock=lambda: next(ticks))
    with trace.span("actor", "decode"):
        pass
    with trace.wait("update"):
        pass
    assert trace.take() == ([Span(("cpu:0",), "actor", "decode", 1.0, 2.5)], [Wait(("cpu:0",), "update", 7.0, 7.25)])


def test_a_chunk_waits_until_the_first_scorer_begins_to_read_it() -> None:
    actor, scorer = ("cpu:0",), ("cpu:1",)
    work = [
        Span(actor, "actor", "decode", 0, 2, chunk=1, rows=5),
        Span(actor, "actor", "decode", 2, 4, chunk=2, rows=3),
        Span(scorer, "reward", "reward-prefill", 2, 5, chunk=1, rows=5),
        Span(scorer, "critic", "critic-prefill", 5, 6, chunk=1, rows=5),
        Span(scorer, "reward", "reward-prefill", 6, 7, chunk=2, rows=3),
        Span(actor, "actor", "decode", 10, 12, chunk=1, rows=1),  # the step decodes a second time
        Span(scorer, "reward", "reward-prefill", 11, 12, chunk=1, rows=1),
        Span(scorer, "reference", "reference-prefill", 13, 14, chunk=0, rows=9),
    ]
    pairs = handovers(work)
    assert pairs == [(0, 2), (0, 3), (1, 4), (5, 6)]
    # The last reading began before the actor's span was over: what it read had been sent by then.
    assert waiting_handovers(work, pairs) == [(2, 1), (2, 0), (4, 1), (6, 0), (11, 1), (11, 0)]
    assert live_rows(work) == [(0, 5), (2, 3), (10, 1), (12, 0)]


def test_overlap_factor_counts_work_done_at_the_same_time() -> None:
    work = [Span(("cpu:0",), "actor", "decode", 10, 30, rows=9), Span(("cpu:1",), "reward", "reward-prefill", 10, 20)]
    metrics = StepTrace(DEVICES[:2], work, [], WINDOW, TAIL_ROWS).metrics(tokens=40)
    assert metrics["overlap_factor"] == pytest.approx(1.5)
    assert (metrics["busy/cpu:0"], metrics["busy/cpu:1"], metrics["bubble/cpu:1"]) == pytest.approx((1.0, 0.5, 0.5))
    assert metrics["perf/throughput"] == pytest.approx(2.0)
    assert metrics["idle_s/cpu:1/decode"] == pytest.approx(10.0)


@pytest.fixture(params=["sequential_run", "oppo_run"])
def real_run(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_in_a_real_run_busy_and_idle_fill_the_windows(real_run: Any) -> None:
    devices = real_run.engine.layout.devices
    assert len(devices) == 2
    for event in (e for e in real_run.events if e.kind == "step"):
        for device in devices:
            busy, bubble = event.metrics[f"busy/{device}"], event.metrics[f"bubble/{device}"]
            idle = sum(v for k, v in event.metrics.items() if k.startswith(f"idle_s/{device}/"))
            assert busy + bubble == pytest.approx(1)
            assert busy * event.metrics["timing_s/step"] + idle == pytest.approx(event.metrics["timing_s/step"], abs=1e-6)


def test_in_a_real_run_hardly_anything_is_unexplained(real_run: Any) -> None:
    steps = [e for e in real_run.events if e.kind == "step"]
    whole = sum(e.metrics["timing_s/step"] for e in steps)
    for device in real_run.engine.layout.devices:
        unknown = sum(e.metrics.get(f"idle_s/{device}/unknown", 0.0) for e in steps)
        assert unknown <= 0.02 * whole, f"{device}: {unknown / whole:.1%} of the time has no cause"


def test_windows_follow_each_other_without_a_gap(real_run: Any) -> None:
    told = [e for e in real_run.events if e.kind == "spans"]
    assert [e.step for e in told] == list(range(1, len(told) + 1))
    assert all(one.window_s[1] == pytest.approx(other.window_s[0], abs=1e-9) for one, other in pairwise(told))
    elapsed = [e.elapsed_s for e in real_run.events if e.kind == "step"]
    assert elapsed == pytest.approx([e.window_s[1] - told[0].window_s[0] for e in told], abs=1e-6)


def test_the_timeline_shows_every_lane_and_what_crossed_a_step(real_run: Any) -> None:
    started = next(e for e in real_run.events if e.kind == "started")
    told = [e for e in real_run.events if e.kind == "spans"]
    for event in told:
        columns = (event.device, event.role, event.phase, event.start_s, event.end_s, event.chunk, event.rows)
        assert len({len(column) for column in columns}) == 1
        assert {(d, r) for d, r in zip(event.device, event.role, strict=True)} <= {tuple(lane) for lane in started.lanes}
        assert all(a <= b for a, b in zip(event.start_s, event.end_s, strict=True))
        assert {"decode", "actor-forward", "advantages", "update-actor", "update-critic"} <= set(event.phase)
        assert {"reward-prefill", "reference-prefill", "critic-prefill"} <= set(event.phase)
    carried = [d for e in told for d in e.deferred]
    deferring = real_run.engine.spec.overlap.inter_step == "defer"
    assert any(d.trained for d in carried) == any(not d.trained for d in carried) == deferring


def test_streaming_overlaps_and_sequential_ppo_does_not(sequential_run: Any, oppo_run: Any) -> None:
    def at_the_same_time(run: Any) -> bool:
        for event in (e for e in run.events if e.kind == "spans"):
            rows = list(zip(event.phase, event.start_s, event.end_s, strict=True))
            decoding = [(a, b) for phase, a, b in rows if phase == "decode"]
            reading = [(a, b) for phase, a, b in rows if phase == "reference-prefill"]
            if any(a < d and c < b for a, b in decoding for c, d in reading):
                return True
        return False

    assert at_the_same_time(oppo_run)
    assert not at_the_same_time(sequential_run)
