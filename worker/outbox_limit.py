"""Detects a full outbox: too many unsent bytes, or low disk space. The engine then drops detail events.

A file next to the engine's events signals it (`oppo_contract.events.FULL_SUFFIX`), and survives this process.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

MAX_BYTES, MIN_FREE = "OPPO_OUTBOX_MOST_BYTES", "OPPO_OUTBOX_LEAST_FREE_BYTES"
DEFAULT_MAX_BYTES, DEFAULT_MIN_FREE = 2 * 2**30, 256 * 2**20
FULL_BELOW_BYTES = 256 * 1024  # what a program that needs space may have left free
RECENT_S = 60.0


class OutboxLimit:
    """Hysteresis: full from the limit on until half of it is sent; on low disk space until twice the minimum is free."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.max_bytes = _number(MAX_BYTES, DEFAULT_MAX_BYTES)
        self._min_free = _number(MIN_FREE, DEFAULT_MIN_FREE)
        self.full = file.exists()
        self.disk_low = False
        self._disk_full_at = float("-inf")

    def update(self, unsent: int) -> str:
        """Update `full` and its file for this many unsent bytes. Returns a log line if it changed, else empty."""
        free = shutil.disk_usage(self._file.parent).free
        if free < FULL_BELOW_BYTES:
            self._disk_full_at = time.monotonic()
        self.disk_low = free < self._min_free * (2 if self.disk_low else 1)
        full = self.disk_low or unsent > self.max_bytes * (0.5 if self.full else 1.0)
        if full == self.full:
            return ""
        self.full = full
        if not full:
            self._file.unlink(missing_ok=True)
            return "the outbox has space again: all events are recorded"
        self._file.touch()
        why = f"{free:,} bytes are free on its disk" if self.disk_low else f"{unsent:,} bytes wait for the platform"
        return f"the outbox is full, {why}: timelines, samples and log lines are dropped"

    def disk_was_full(self) -> bool:
        """Whether its disk was full in the last minute: an engine that ends meanwhile can often not say why."""
        return time.monotonic() - self._disk_full_at < RECENT_S


def _number(name: str, default: float) -> float:
    return float(os.environ.get(name, "").strip() or default)
