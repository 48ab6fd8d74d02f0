"""The engine's side of the outbox: an append-only file, one event a line. It never waits for the network.

While the worker says that the outbox is full, because the platform has been away for long, detail is left out: timelines, answers
and log lines. What was left out is told at once, then every `TOLD_EVERY` steps, and at the end. All else is always written.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from oppo_contract.events import DETAIL_KINDS, EVENT_ADAPTER, FULL_SUFFIX, parse_event
from oppo_core.reporting.dropped_events import LeftOut

# What every rank tells of its own node; the rest concerns the run, and the first rank tells it.
OF_EACH_RANK = ("started", "spans", "log", "left_out", "finished")
# And of a node's further processes: nobody ships their files, which the supervisor reads when one of them has ended the run.
OF_EACH_NEIGHBOUR = ("started", "log", "finished")
TOLD_EVERY = 20


class Journal:
    """Appends numbered events to a file. Numbers go on after the file's last complete line.

    `kinds`: those that are written, where others are another rank's to tell; None: all.
    """

    def __init__(self, path: Path, kinds: tuple[str, ...] | None = None) -> None:
        self._kinds = kinds
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._seq = _repair(path)
        self._lock = threading.Lock()  # trackers' messages come from threads
        self._file = path.open("a", encoding="utf-8")
        self._full = path.with_name(path.name + FULL_SUFFIX)
        self._left_out = LeftOut()

    def write(self, kind: str, at: float | None = None, **payload: Any) -> None:
        """Append an event of `kind` (a class in `oppo_contract.events`); it is on its way to disk when this returns.

        Raises:
            pydantic.ValidationError: the payload does not fit the kind.
        """
        if self._kinds is None or kind in self._kinds:
            with self._lock:
                self._write(kind, at, payload)

    def _write(self, kind: str, at: float | None, payload: dict[str, Any]) -> None:
        if kind in DETAIL_KINDS and self._full.exists():
            if self._left_out.count(kind, payload) % TOLD_EVERY == 1:
                self._tell_left_out()
            return
        if self._left_out.steps and kind in (*DETAIL_KINDS, "finished"):
            self._tell_left_out()
            self._left_out = LeftOut()
        self._append(kind, at, payload)

    def _tell_left_out(self) -> None:
        """What was left out since it was told last."""
        told = self._left_out.take()
        if told is not None:
            self._append("left_out", None, told)

    def _append(self, kind: str, at: float | None, payload: dict[str, Any]) -> None:
        self._seq += 1
        fields = {"kind": kind, "producer": "engine", "seq": self._seq, "time": time.time() if at is None else at, **payload}
        line = EVENT_ADAPTER.validate_python(fields).model_dump_json()
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Make sure that everything is on disk."""
        self._tell_left_out()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _repair(path: Path) -> int:
    """Number of the last event; a line that a crash left half-written is cut off."""
    if not path.exists():
        return 0
    whole = path.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        with path.open("r+b") as file:
            file.truncate(len(kept))
    lines = kept.splitlines()
    return parse_event(lines[-1]).seq if lines else 0
