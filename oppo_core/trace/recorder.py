"""Records spans: role, phase, devices, start and end. Costs two clock readings and one list entry per span.

`time.monotonic` is one clock for all processes of a machine, so spans of the actor's and the scorers' process are comparable. A
CPU
"device" is a core: work on n threads occupies n of them (docs/algorithm.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from oppo_contract.events import IdleCause, Phase, Role
from oppo_core.models.oom_retry import Shrunk


# Tuples, because creating and sending them costs a third of a frozen dataclass (docs/performance.md).
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
        self._held_up: list[tuple[float, float]] = []

    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Recording:
        """Record the block, even if it fails."""
        return Recording(self, role, phase, chunk, rows)

    def wait(self, cause: IdleCause) -> Waiting:
        """Record the block as waiting, even if it fails."""
        return Waiting(self, cause)

    def blocked(self, cause: IdleCause, start: float) -> None:
        """The current span was blocked from `start` until now: that time is a wait, not its work."""
        end = self.clock()
        self.waits.append(Wait(self.devices, cause, start, end))
        self._held_up.append((start, end))

    def worked(self, start: float, end: float) -> list[tuple[float, float]]:
        """Record work from `start` to `end` without its blocked times."""
        if not self._held_up:
            return [(start, end)]
        within = [pause for pause in self._held_up if pause[0] >= start]
        return list(zip([start, *(p[1] for p in within)], [*(p[0] for p in within), end], strict=True))

    def take(self) -> tuple[list[Span], list[Wait]]:
        """Spans since the last call."""
        taken = self.spans, self.waits
        self.spans, self.waits, self._held_up = [], [], []
        return taken

    def record_shrunk(self, shrunk: Shrunk) -> None:
        """Passes were reduced after running out of memory."""
        self.shrunk.append(shrunk)

    def take_shrunk(self) -> list[Shrunk]:
        """Reductions of passes since the last call."""
        taken, self.shrunk = self.shrunk, []
        return taken


class Recording:
    """A running span."""

    __slots__ = ("_chunk", "_phase", "_recorder", "_role", "_rows", "_start")

    def __init__(self, recorder: Recorder, role: Role, phase: Phase, chunk: int, rows: int) -> None:
        self._recorder, self._role, self._phase, self._chunk, self._rows = recorder, role, phase, chunk, rows

    def __enter__(self) -> None:
        self._start = self._recorder.clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        recorder = self._recorder
        for start, end in recorder.worked(self._start, recorder.clock()):
            recorder.spans.append(Span(recorder.devices, self._role, self._phase, start, end, self._chunk, self._rows))


class Waiting:
    """A running wait."""

    __slots__ = ("_cause", "_recorder", "_start")

    def __init__(self, recorder: Recorder, cause: IdleCause) -> None:
        self._recorder, self._cause = recorder, cause

    def __enter__(self) -> None:
        self._start = self._recorder.clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        recorder = self._recorder
        recorder.waits.append(Wait(recorder.devices, self._cause, self._start, recorder.clock()))
