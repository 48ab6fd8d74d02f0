"""The virtual clock. The loop's work advances it while other processes work through their queues.

Deterministic: a process starts its next task at max(end of the previous task, submission). Processes that work at the same time
slow each other down by the same factor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oppo_contract.events import Phase, Role
from oppo_core.trace.recorder import Span


@dataclass(slots=True)
class Task:
    """Work in a process's queue: `left` seconds of it, without contention.

    `shares`: each device's work relative to the slowest's; empty if all work alike.
    """

    role: Role
    phase: Phase
    left: float
    chunk: int = 0
    rows: int = 0
    start: float | None = None
    shares: tuple[float, ...] = ()


@dataclass(slots=True)
class Process:
    """A process besides the loop's: its devices, and its queue of tasks."""

    devices: tuple[str, ...]
    tasks: deque[Task] = field(default_factory=deque)


class Timeline:
    """Seconds since the simulation began, read by calling it.

    `done` is called with each finished span of the other processes and its task's `shares`.
    """

    def __init__(self, contention: float, done: Callable[[Span, tuple[float, ...]], None]) -> None:
        self.now = 0.0
        self.processes: list[Process] = []
        self._contention = contention
        self._done = done

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """Spend `seconds` in the loop's process, or longer under contention."""
        while seconds > 0:
            seconds -= self._advance(seconds, 1)

    def submit(self, process: Process, task: Task) -> None:
        """Queue a task; it starts when those before it are done, not before now."""
        if task.left > 0:
            process.tasks.append(task)

    def submitted(self) -> list[Task]:
        """The newest task of every process that is not done."""
        return [process.tasks[-1] for process in self.processes if process.tasks]

    def wait(self, tasks: Sequence[Task] | None = None) -> None:
        """Block the loop's process until `tasks` are done; default: all that is submitted."""
        tasks = self.submitted() if tasks is None else tasks
        while any(task.left > 0 for task in tasks):
            self._advance(float("inf"), 0)

    def _advance(self, most: float, working: int) -> float:
        """Advance until the first task is done, or the loop's process has worked `most` seconds; returns seconds of work."""
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
                span = Span(process.devices, task.role, task.phase, task.start, self.now, task.chunk, task.rows)
                self._done(span, task.shares)
        return work
