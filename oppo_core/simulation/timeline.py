"""The virtual clock. The loop's own work moves it; processes beside it work through their queues meanwhile.

Deterministic: a process starts its next task at max(own free time, arrival), and everything that works at the same moment slows
everything else down by the same factor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from oppo_contract.events import Phase, Role
from oppo_core.trace.recorder import Span


@dataclass(slots=True)
class Task:
    """Work that a process has been given: `left` seconds of it, counted as if nobody else worked."""

    role: Role
    phase: Phase
    left: float
    chunk: int = 0
    rows: int = 0
    start: float | None = None


@dataclass(slots=True)
class Process:
    """A process beside the loop: its devices, and its tasks in order."""

    devices: tuple[str, ...]
    tasks: deque[Task] = field(default_factory=deque)


class Timeline:
    """Seconds since the simulation began, read by calling it. `done` is told of every span of work beside the loop."""

    def __init__(self, contention: float, done: Callable[[Span], None]) -> None:
        self.now = 0.0
        self.processes: list[Process] = []
        self._contention = contention
        self._done = done

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """The loop's process works for `seconds`, or longer when others slow it down."""
        while seconds > 0:
            seconds -= self._pass(seconds, 1)

    def give(self, process: Process, task: Task) -> None:
        """Queue a task; it starts when those before it are done, not before now."""
        if task.left > 0:
            process.tasks.append(task)

    def wait(self) -> None:
        """The loop's process stands still until every other one is done."""
        while any(process.tasks for process in self.processes):
            self._pass(float("inf"), 0)

    def _pass(self, most: float, working: int) -> float:
        """Let everybody work until the first is done, the loop's process for at most `most` seconds; returns seconds of work."""
        busy = [process for process in self.processes if process.tasks]
        work = min([most, *(process.tasks[0].left for process in busy)])
        slower = 1 + (self._contention - 1) * max(0, len(busy) + working - 1)
        for process in busy:
            task = process.tasks[0]
            task.start = self.now if task.start is None else task.start
        self.now += work * slower
        for process in busy:
            task = process.tasks[0]
            task.left -= work
            if task.left <= 0:
                process.tasks.popleft()
                assert task.start is not None
                self._done(Span(process.devices, task.role, task.phase, task.start, self.now, task.chunk, task.rows))
        return work
