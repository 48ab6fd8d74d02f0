"""Reads a run's event log while the engine appends to it.

The worker may delete the beginning of the log once the platform has it (`worker.outbox`): what was deleted reads as a hole,
or as zeros. It is skipped and counted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 2**22  # more than an event has; zeros may be a longer line


class EventTail:
    """`offset`: bytes read so far; `skipped`: events that were deleted before they were read."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self.offset, self.skipped = offset, 0
        self._seq = 0  # of the last event

    def read(self, most: int) -> list[dict[str, Any]]:
        """The next events, at most so many. A last line without its end is not read yet."""
        events: list[dict[str, Any]] = []
        with self._path.open("rb") as file:
            file.seek(_first_data(file.fileno(), self.offset))
            while len(events) < most:
                line = file.readline(MAX_LINE_BYTES)
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    break
                self.offset = file.tell()
                try:
                    event = json.loads(line.lstrip(b"\0"))
                except ValueError:  # its beginning was deleted
                    continue
                if self._seq:
                    self.skipped += event["seq"] - self._seq - 1
                self._seq = event["seq"]
                events.append(event)
        return events


def _first_data(descriptor: int, offset: int) -> int:
    """`offset`, or the end of the hole there."""
    if sys.platform != "linux":
        return offset
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # at the end of the file
        return offset
