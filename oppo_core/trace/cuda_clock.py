"""Spans of work on a GPU's stream, from its start to its end on the device.

The host's clock measures queueing only, so a span records two CUDA events in the stream, which are read once per step. Waits use
the host's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from oppo_contract.events import Phase, Role
from oppo_core.trace.recorder import Recorder, Span, Wait, subtract


def timed_event() -> torch.cuda.Event:
    """A new event with timing."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Anchor(NamedTuple):
    """An event, and the recorder's clock in seconds when the stream reached it."""

    event: torch.cuda.Event
    at: float


class Mark(NamedTuple):
    """An event, and the previous anchor, relative to which it is measured."""

    event: torch.cuda.Event
    anchor: Anchor

    def at(self) -> float:
        """The recorder's clock when the stream reached it, in seconds."""
        elapsed_ms: float = self.anchor.event.elapsed_time(self.event)
        return self.anchor.at + elapsed_ms / 1000


class CudaRecorder(Recorder):
    """A `Recorder` with device times. It belongs to one thread, and records on that thread's current stream."""

    def __init__(
        self,
        devices: tuple[str, ...],
        clock: Callable[[], float] = time.monotonic,
        event: Callable[[], torch.cuda.Event] = timed_event,
    ) -> None:
        super().__init__(devices, clock)
        self._event = event
        self._free: list[torch.cuda.Event] = []  # reused: creating an event costs more than recording it
        self._queued: list[tuple[Mark, Mark, Span]] = []  # spans without times
        self._anchor: Anchor | None = None

    @contextmanager
    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Iterator[None]:
        first = self._mark()
        try:
            yield
        finally:
            self._queued.append((first, self._mark(), Span(self.devices, role, phase, 0.0, 0.0, chunk, rows)))

    def _mark(self) -> Mark:
        """Record an event at the current position of the stream."""
        if self._anchor is None:
            self._anchor = self._new_anchor()
        event = self._free.pop() if self._free else self._event()
        event.record()
        return Mark(event, self._anchor)

    def take(self) -> tuple[list[Span], list[Wait]]:
        """Spans since the last call. Waits until the device has completed them."""
        for first, last, span in self._queued:
            last.event.synchronize()
            pieces = subtract(first.at(), last.at(), self._blocked)
            self.spans += [span._replace(start=start, end=end) for start, end in pieces]
            self._free += [first.event, last.event]
        if self._queued:
            # float32 milliseconds are coarse after a long time: after a day, 5 ms.
            self._anchor = self._new_anchor()
        self._queued = []
        return super().take()

    def _new_anchor(self) -> Anchor:
        event = self._event()
        event.record()
        event.synchronize()
        return Anchor(event, self.clock())


def build_recorder(devices: tuple[str, ...], device: torch.device) -> Recorder:
    """The recorder for work on `device`, called `devices` in the trace."""
    return CudaRecorder(devices) if device.type == "cuda" else Recorder(devices)
