"""Spans: who worked on what, from when to when. Two clock readings and one list entry a span.

`time.monotonic` is one clock for all processes of a machine, so spans of the actor and of a scorer process can be laid
side by side. A CPU "device" is a core: work on n threads occupies n of them (docs/algorithm.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from oppo_contract.events import IdleCause, Phase, Role
from oppo_core.models.oom_retry import Shrunk


# Tuples, because they are made and sent between processes at a third of a frozen dataclass's cost (docs/performance.md).
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
    """The process on `devices` stood still, and knows for what."""

    devices: tuple[str, ...]
    cause: IdleCause
    start: float
    end: float


class Recorder:
    """Collects one process's spans and waits. `devices` may be changed between spans, as stages use more or fewer.

    `clock` gives seconds; all recorders of a run must read the same one (virtual devices have one of their own).
    """

    def __init__(self, devices: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> None:
        self.devices = devices
        self.clock = clock
        self.spans: list[Span] = []
        self.waits: list[Wait] = []
        self.shrunk: list[Shrunk] = []
        self._held_up: list[tuple[float, float]] = []

    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Recording:
        """Record the enclosed work, also when it fails."""
        return Recording(self, role, phase, chunk, rows)

    def wait(self, cause: IdleCause) -> Waiting:
        """Record the enclosed waiting, also when it fails."""
        return Waiting(self, cause)

    def held_up(self, cause: IdleCause, start: float) -> None:
        """The span under way stood still from `start` until now: that time is a wait and no work of its."""
        end = self.clock()
        self.waits.append(Wait(self.devices, cause, start, end))
        self._held_up.append((start, end))

    def worked(self, start: float, end: float) -> list[tuple[float, float]]:
        """From `start` to `end` without the times for which it was held up."""
        if not self._held_up:
            return [(start, end)]
        within = [pause for pause in self._held_up if pause[0] >= start]
        return list(zip([start, *(p[1] for p in within)], [*(p[0] for p in within), end], strict=True))

    def take(self) -> tuple[list[Span], list[Wait]]:
        """What was recorded since the last call."""
        taken = self.spans, self.waits
        self.spans, self.waits, self._held_up = [], [], []
        return taken

    def ran_short(self, shrunk: Shrunk) -> None:
        """Passes have been made smaller."""
        self.shrunk.append(shrunk)

    def take_shrunk(self) -> list[Shrunk]:
        """Passes that were made smaller since the last call."""
        taken, self.shrunk = self.shrunk, []
        return taken


class Recording:
    """A span that is under way."""

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
    """A wait that is under way."""

    __slots__ = ("_cause", "_recorder", "_start")

    def __init__(self, recorder: Recorder, cause: IdleCause) -> None:
        self._recorder, self._cause = recorder, cause

    def __enter__(self) -> None:
        self._start = self._recorder.clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        recorder = self._recorder
        recorder.waits.append(Wait(recorder.devices, self._cause, self._start, recorder.clock()))
