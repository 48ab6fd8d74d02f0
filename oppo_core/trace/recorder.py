"""Spans: who worked on what, from when to when. Two clock readings and one list entry a span.

`time.monotonic` is one clock for all processes of a machine, so spans of the actor and of a scorer process can be laid
side by side. A CPU "device" is a core: work on n threads occupies n of them (docs/algorithm.md).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oppo_contract.events import IdleCause, Phase, Role


@dataclass(frozen=True, slots=True)
class Span:
    """Work of `role` in `phase` on `devices`. Times in seconds of `time.monotonic`."""

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
    """Collects one process's spans and waits. `devices` may be changed between spans, as stages use more or fewer."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self.spans: list[Span] = []
        self.waits: list[Wait] = []

    @contextmanager
    def span(self, role: Role, phase: Phase, chunk: int = 0, rows: int = 0) -> Iterator[None]:
        """Record the enclosed work."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.spans.append(Span(self.devices, role, phase, start, time.monotonic(), chunk, rows))

    @contextmanager
    def wait(self, cause: IdleCause) -> Iterator[None]:
        """Record the enclosed waiting."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.waits.append(Wait(self.devices, cause, start, time.monotonic()))

    def take(self) -> tuple[list[Span], list[Wait]]:
        """What was recorded since the last call."""
        taken = self.spans, self.waits
        self.spans, self.waits = [], []
        return taken
