"""Spans with a GPU's times, on a fake stream."""

from __future__ import annotations

import pytest
import torch

from oppo_core.trace.cuda_clock import CudaRecorder, build_recorder
from oppo_core.trace.recorder import Recorder, Span, Wait, subtract


class Gpu:
    """A stream that executes queued work in order, and a host clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free_at = 0.0
        self.made = 0

    def queue(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def clock(self) -> float:
        return self.now

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.reached = 0.0

    def record(self) -> None:
        self.reached = max(self._gpu.free_at, self._gpu.now)

    def synchronize(self) -> None:
        self._gpu.now = max(self._gpu.now, self.reached)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert max(self.reached, end_event.reached) <= self._gpu.now, "queried before the stream reached it"
        assert end_event.reached >= self.reached
        return (end_event.reached - self.reached) * 1000


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


def recorder(gpu: Gpu) -> CudaRecorder:
    return CudaRecorder(("cuda:0",), gpu.clock, gpu.event)


def times(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(span.phase, pytest.approx(span.start), pytest.approx(span.end)) for span in spans]


def test_a_span_has_the_device_s_times(gpu: Gpu) -> None:
    trace = recorder(gpu)
    with trace.span("actor", "decode", chunk=2, rows=5):
        gpu.queue(3.0)
        gpu.now += 0.1
    with trace.span("actor", "actor-forward"):
        gpu.queue(1.0)
    spans, _ = trace.take()
    assert times(spans) == [("decode", 100.0, 103.0), ("actor-forward", 103.0, 104.0)]
    assert (spans[0].devices, spans[0].role, spans[0].chunk, spans[0].rows) == (("cuda:0",), "actor", 2, 5)
    assert trace.take() == ([], [])


def test_waits_and_other_spans_do_not_change(gpu: Gpu) -> None:
    trace = recorder(gpu)
    other = Span(("cuda:0",), "reward", "score", 1.0, 2.0)
    trace.spans.append(other)
    with trace.wait("score"):
        gpu.now += 2.0
    assert trace.take() == ([other], [Wait(("cuda:0",), "score", 100.0, 102.0)])


def test_a_span_may_end_after_take(gpu: Gpu) -> None:
    trace = recorder(gpu)
    with trace.span("actor", "update-actor"):
        gpu.queue(1.0)
    with trace.span("actor", "data"):
        gpu.queue(0.5)
        first, _ = trace.take()
        gpu.queue(0.5)
    gpu.now += 5.0
    assert [span.phase for span in first] == ["update-actor"]
    later, _ = trace.take()
    assert times(later) == [("data", 101.0, 102.0)]


def test_blocked_time_is_a_wait(gpu: Gpu) -> None:
    trace = recorder(gpu)
    with trace.span("actor", "decode"):
        gpu.queue(1.0)
        gpu.now += 4.0
        trace.blocked("score", 102.0)
        gpu.queue(1.0)
    spans, waits = trace.take()
    assert times(spans) == [("decode", 100.0, 102.0), ("decode", 104.0, 105.0)]
    assert waits == [Wait(("cuda:0",), "score", 102.0, 104.0)]


def test_events_are_reused(gpu: Gpu) -> None:
    trace = recorder(gpu)
    for _ in range(5):
        for _ in range(10):
            with trace.span("actor", "decode"):
                gpu.queue(0.1)
        trace.take()
    anchors = 6
    assert gpu.made == 20 + anchors


def test_a_failing_span_is_recorded(gpu: Gpu) -> None:
    trace = recorder(gpu)
    with pytest.raises(ZeroDivisionError), trace.span("actor", "decode"):
        _ = 1 / 0
    assert len(trace.take()[0]) == 1


def test_subtract_clips_pauses() -> None:
    assert subtract(1.0, 5.0, [(0.0, 2.0), (3.0, 4.0), (4.5, 9.0)]) == [(2.0, 3.0), (4.0, 4.5)]
    assert subtract(1.0, 5.0, [(6.0, 7.0)]) == [(1.0, 5.0)]
    assert subtract(2.0, 2.0, []) == [(2.0, 2.0)]


def test_cpu_work_uses_the_host_clock() -> None:
    assert type(build_recorder(("cpu:0",), torch.device("cpu"))) is Recorder
