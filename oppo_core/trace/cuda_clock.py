"""Spans of work on a GPU's stream, from its start to its end on the device.

The host's clock measures queueing only. Here a span records two CUDA events in the stream, which are read once per step. Waits
are
the host's own and use its clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Protocol, cast

import torch

from oppo_contract.events import Phase, Role
from oppo_core.trace.recorder import Recorder, Recording, Span, Wait


class Event(Protocol):
    """The used part of `torch.cuda.Event`."""

    def record(self) -> None:
        """Record it on the current stream."""

    def synchronize(self) -> None:
        """Wait until the stream has reached it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to `end_event`; both have been reached."""


def timed_event() -> Event:
    """A new event with timing."""
    return cast(Event, torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event, and the recorder's clock in seconds when the stream reached it."""

    event: Event
    at: float


class Mark(NamedTuple):
    """An event, and the previous anchor, relative to which it is measured."""

    event: Event
    anchor: Anchor

    def at(self) -> float:
        """The recorder's clock when the stream reached it, in seconds."""
        return self.anchor.at + self.anchor.event.elapsed_time(self.event) / 1000


class Queued(NamedTuple):
    """A span whose events are recorded in the stream."""

    devices: tuple[str, ...]
    role: Role
    phase: Phase
    start: Mark
    end: Mark
    chunk: int
    rows: int


class CudaRecorder(Recorder):
    """A `Recorder` with device times. It belongs to one thread, and records on that thread's current stream."""

    def __init__(
        self, devices: tuple[str, ...], clock: Callable[[], float] = time.monotonic, event: Callable[[], Event] = timed_event
    ) -> None:
        super().__init__(devices, clock)
        self._event = event
        self._idle: list[Event] = []  # reused: creating an event costs more than recording it
        self._queued: list[Queued] = []
        self._anchor: Anchor | None = None

    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Recording:
        return QueuedRecording(self, role, phase, chunk, rows)

    def mark(self) -> Mark:
        """Record an event at the current position of the stream."""
        if self._anchor is None:
            self._anchor = self._anchored()
        event = self._idle.pop() if self._idle else self._event()
        event.record()
        return Mark(event, self._anchor)

    def queued(self, span: Queued) -> None:
        """Both events of `span` are recorded."""
        self._queued.append(span)

    def take(self) -> tuple[list[Span], list[Wait]]:
        """Spans since the last call. Waits until the device has completed them."""
        for span in self._queued:
            span.end.event.synchronize()
            start, end = span.start.at(), span.end.at()
            pieces = without(start, end, self._held_up)
            self.spans += [Span(span.devices, span.role, span.phase, a, b, span.chunk, span.rows) for a, b in pieces]
            self._idle += [span.start.event, span.end.event]
        if self._queued:
            # float32 milliseconds are coarse after a long time: after a day, 5 ms.
            self._anchor = self._anchored()
        self._queued = []
        return super().take()

    def _anchored(self) -> Anchor:
        event = self._event()
        event.record()
        event.synchronize()
        return Anchor(event, self.clock())


class QueuedRecording(Recording):
    """A running span with events at its ends."""

    __slots__ = ("_first", "_trace")

    def __init__(self, recorder: CudaRecorder, role: Role, phase: Phase, chunk: int, rows: int) -> None:
        super().__init__(recorder, role, phase, chunk, rows)
        self._trace = recorder

    def __enter__(self) -> None:
        self._first = self._trace.mark()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        given = (self._trace.devices, self._role, self._phase, self._first, self._trace.mark(), self._chunk, self._rows)
        self._trace.queued(Queued(*given))


def without(start: float, end: float, pauses: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Parts of `start` to `end` outside `pauses`, which are in order and do not overlap."""
    edges = [start, *(min(max(edge, start), end) for pause in pauses for edge in pause), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a or not pauses]


def build_recorder(devices: tuple[str, ...], device: torch.device) -> Recorder:
    """The recorder for work on `device`, called `devices` in the trace."""
    return CudaRecorder(devices) if device.type == "cuda" else Recorder(devices)
