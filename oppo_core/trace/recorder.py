"""Spans: who worked on what, from when to when. Two clock readings and one list entry a span.

`time.monotonic` is one clock for all processes of a machine, so spans of the actor and of a scorer process can be laid
side by side. A CPU "device" is a core: work on n threads occupies n of them (docs/algorithm.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oppo_contract.events import IdleCause, Phase, Role


@dataclass(frozen=True, slots=True)
class Span:
    """Work of `role` in `phase` on `devices`. Times in seconds of the recorder's clock."""

    devices: tuple[str, ...]
    role: Role
    phase: Phase
    start: float
    end: float
    chunk: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Wait:
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

    @contextmanager
    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Iterator[None]:
        """Record the enclosed work."""
        start = self.clock()
        try:
            yield
        finally:
            self.spans.append(Span(self.devices, role, phase, start, self.clock(), chunk, rows))

    @contextmanager
    def wait(self, cause: IdleCause) -> Iterator[None]:
        """Record the enclosed waiting."""
        start = self.clock()
        try:
            yield
        finally:
            self.waits.append(Wait(self.devices, cause, start, self.clock()))

    def take(self) -> tuple[list[Span], list[Wait]]:
        """What was recorded since the last call."""
        taken = self.spans, self.waits
        self.spans, self.waits = [], []
        return taken
