"""Reads a run's event log while the engine appends to it (tail).

The worker may delete the log's uploaded beginning (`worker.outbox`), which then reads as a hole or as zeros; it is skipped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MAX_LINE_BYTES = 2**22  # longer than any event; deleted bytes may form a longer line


class EventTail:
    """`offset`: bytes read so far; `skipped`: events that were deleted before they were read."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self.offset, self.skipped = offset, 0
        self._seq = 0  # number of the last event

    def read(self, most: int) -> list[dict[str, Any]]:
        """At most `most` further events. An incomplete last line is left for the next call."""
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
                except ValueError:  # partly deleted
                    continue
                if self._seq:
                    self.skipped += event["seq"] - self._seq - 1
                self._seq = event["seq"]
                events.append(event)
        return events


def _first_data(descriptor: int, offset: int) -> int:
    """`offset`, or the end of the hole at that offset."""
    if sys.platform != "linux":
        return offset
    try:
        return os.lseek(descriptor, offset, os.SEEK_DATA)
    except OSError:  # at the end of the file
        return offset
