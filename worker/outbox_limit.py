"""When an outbox is full: too much waits for the platform, or its disk is about to be. The engine then leaves out detail.

A file beside the engine's events says so (`oppo_contract.events.FULL_SUFFIX`), so that it outlives this process.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MOST_BYTES, LEAST_FREE = "OPPO_OUTBOX_MOST_BYTES", "OPPO_OUTBOX_LEAST_FREE_BYTES"
DEFAULT_MOST_BYTES, DEFAULT_LEAST_FREE = 2 * 2**30, 256 * 2**20


class OutboxLimit:
    """Full from the limit on, until half of it is sent; and while little is free on the disk, until twice as much is."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.most_bytes = _number(MOST_BYTES, DEFAULT_MOST_BYTES)
        self._least_free = _number(LEAST_FREE, DEFAULT_LEAST_FREE)
        self.full = file.exists()
        self.disk_low = False

    def look(self, waiting: int) -> str:
        """Look again, with so many bytes that wait. Returns what is to be said of it, or nothing."""
        free = shutil.disk_usage(self._file.parent).free
        self.disk_low = free < self._least_free * (2 if self.disk_low else 1)
        full = self.disk_low or waiting > self.most_bytes * (0.5 if self.full else 1.0)
        if full == self.full:
            return ""
        self.full = full
        if not full:
            self._file.unlink(missing_ok=True)
            return "the outbox has space again: all events are recorded"
        self._file.touch()
        why = f"{free:,} bytes are free on its disk" if self.disk_low else f"{waiting:,} bytes wait for the platform"
        return f"the outbox is full, {why}: timelines, samples and log lines are dropped"


def _number(name: str, default: float) -> float:
    return float(os.environ.get(name, "").strip() or default)
