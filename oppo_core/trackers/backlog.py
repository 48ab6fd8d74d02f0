"""What waits for a tracker's process: bounded, and thinned out evenly when it is full."""

from __future__ import annotations

import threading
from collections import deque

MOST_STEPS = 1000
MOST_ANSWERS = 50


class Backlog:
    """Lines for a tracker, oldest first. One thread puts, which never waits; another one takes.

    `told`: steps that were put so far; `dropped`: those of them that gave way to others.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most = most
        self._lines: deque[tuple[str, str]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._steps = self._answers = 0
        self.told = self.dropped = 0

    def put(self, kind: str, line: str) -> None:
        """Add a line. Beyond the bounds, answers are left out first, then every other step that waits."""
        with self._changed:
            if kind == "samples" and self._answers >= MOST_ANSWERS:
                return
            self._lines.append((kind, line))
            self._count(kind, 1)
            self.told += kind == "step"
            if self._steps > self._most:
                self._thin()
            self._changed.notify()

    def _count(self, kind: str, by: int) -> None:
        self._steps += by * (kind == "step")
        self._answers += by * (kind == "samples")

    def _thin(self) -> None:
        """Keep the newest step and every other one before it: the whole course at half the resolution."""
        kept: deque[tuple[str, str]] = deque()
        number = 0
        for kind, line in reversed(self._lines):
            number += kind == "step"
            if kind == "samples" or (kind == "step" and number % 2 == 0):
                self.dropped += kind == "step"
                self._count(kind, -1)
            else:
                kept.appendleft((kind, line))
        self._lines = kept

    def take(self) -> str | None:
        """The oldest line, once there is one; None when the backlog is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._closed)
            if not self._lines:
                return None
            kind, line = self._lines.popleft()
            self._count(kind, -1)
            return line

    def close(self) -> None:
        """Nothing more will be put."""
        with self._changed:
            self._closed = True
            self._changed.notify()
