"""Records spans: role, phase, devices, start and end. Costs two clock readings and one list entry per span.

`time.monotonic` is one clock for all processes of a machine, so spans of the actor's and the scorers' process are comparable. A
CPU "device" is a core: work on n threads occupies n of them (docs/algorithm.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from oppo_contract.events import IdleCause, Phase, Role
from oppo_core.models.oom_retry import Shrunk


# Tuples, because creating and sending them costs a third of a frozen dataclass (docs/measurements/2026-11-27.md).
class Span(NamedTuple):
    """Work of `role` in `phase` on `devices`. Times in seconds of the recorder's clock; `chunk` counts from 1 in a step."""

    devices: tuple[str, ...]
    role: Role
    phase: Phase
    start: float
    end: float
    chunk: int = 0
    rows: int = 0


class Wait(NamedTuple):
    """The process on `devices` waited, with the reason."""

    devices: tuple[str, ...]
    cause: IdleCause
    start: float
    end: float


class Recorder:
    """Collects one process's spans and waits. `devices` may change between spans, as stages use more or fewer.

    `clock` gives seconds; all recorders of a run must use the same one (virtual devices have one of their own).
    """

    def __init__(self, devices: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self.devices = devices
        self.clock = clock
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.shrunk: list[Shrunk] = []
        self._blocked: list[tuple[float, float]] = []

    @contextmanager
    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Iterator[None]:
        """Record the block, even if it fails."""
        begin = self.clock()
        try:
            yield
        finally:
            pieces = subtract(begin, self.clock(), self._blocked)
            self.spans += [Span(self.devices, role, phase, start, end, chunk, rows) for start, end in pieces]

    @contextmanager
    def wait(self, cause: IdleCause) -> Iterator[None]:
        """Record the block as waiting, even if it fails."""
        start = self.clock()
        try:
            yield
        finally:
            self.waits.append(Wait(self.devices, cause, start, self.clock()))

    def blocked(self, cause: IdleCause, start: float) -> None:
        """The current span was blocked from `start` until now: that time is a wait, not its work."""
        end = self.clock()
        self.waits.append(Wait(self.devices, cause, start, end))
        self._blocked.append((start, end))

    def take(self) -> tuple[list[Span], list[Wait]]:
        """Spans since the last call."""
        taken = self.spans, self.waits
        self.spans, self.waits, self._blocked = [], [], []
        return taken

    def record_shrunk(self, shrunk: Shrunk) -> None:
        """Passes were reduced after running out of memory."""
        self.shrunk.append(shrunk)

    def take_shrunk(self) -> list[Shrunk]:
        """Reductions of passes since the last call."""
        taken, self.shrunk = self.shrunk, []
        return taken


def subtract(start: float, end: float, pauses: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Parts of `start` to `end` outside `pauses`, which are in order and do not overlap."""
    edges = [start, *(min(max(edge, start), end) for pause in pauses for edge in pause), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a or not pauses]
