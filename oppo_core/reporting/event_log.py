"""The engine's event log: an append-only JSON Lines file, which the worker uploads (outbox). Writing never waits for the network.

While the worker marks the outbox as full, details (timelines, samples, log lines) are dropped; `left_out` events report their
counts at once, every `REPORT_EVERY` steps, and at the end. All other events are always written.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oppo_contract.events import DETAIL_KINDS, EVENT_ADAPTER, FULL_SUFFIX, parse_event

# Events of one rank per node, about the node; rank 0 writes those about the run.
NODE_EVENTS = ("started", "spans", "log", "left_out", "finished")
# Events of a node's other local ranks. Their files are not uploaded; the supervisor reads them to find the failing rank.
LOCAL_RANK_EVENTS = ("started", "log", "finished")
REPORT_EVERY = 20


@dataclass(slots=True)
class DroppedEvents:
    """Counts of one period in which the outbox was full."""

    steps: int = 0  # in this period, reported or not
    last_step: int = -1
    pending: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, payload: dict[str, Any]) -> int:
        """Count a dropped event. Returns the number of its step within the period, from 1; 0 if the step is not new.

        Log lines count to the step of the previous event.
        """
        step = int(payload.get("step", max(self.last_step, 0)))
        new = step != self.last_step
        self.last_step = step
        self.steps += new
        counts = self.pending or {"from_step": step, "to_step": step, "timelines": 0, "answers": 0, "lines": 0}
        counts["from_step"], counts["to_step"] = min(counts["from_step"], step), max(counts["to_step"], step)
        counts["timelines"] += kind == "spans"
        counts["answers"] += len(payload.get("samples", ()))
        counts["lines"] += len(payload.get("lines", ()))
        self.pending = counts
        return self.steps if new else 0

    def take(self) -> dict[str, int]:
        """The counts since the last call; empty if nothing was dropped."""
        counts, self.pending = self.pending, {}
        return counts


class Journal:
    """Appends events to a file, numbered on from its last complete line.

    `kinds`: the kinds to write, others are ignored; None for all.
    """

    def __init__(self, path: Path, kinds: tuple[str, ...] | None = None) -> None:
        self._kinds = kinds
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._seq = _truncate_partial_line(path)
        self._lock = threading.Lock()  # trackers' messages come from threads
        self._file = path.open("a", encoding="utf-8")
        self._full = path.with_name(path.name + FULL_SUFFIX)
        self._dropped = DroppedEvents()

    def write(self, kind: str, at: float | None = None, **payload: Any) -> None:
        """Append an event of `kind` (a class in `oppo_contract.events`) and flush it to the operating system.

        Raises:
            pydantic.ValidationError: the payload does not fit the kind.
        """
        if self._kinds is None or kind in self._kinds:
            with self._lock:
                self._write(kind, at, payload)

    def _write(self, kind: str, at: float | None, payload: dict[str, Any]) -> None:
        if kind in DETAIL_KINDS and self._full.exists():
            if self._dropped.count(kind, payload) % REPORT_EVERY == 1:
                self._report_dropped()
            return
        if self._dropped.steps and kind in (*DETAIL_KINDS, "finished"):
            self._report_dropped()
            self._dropped = DroppedEvents()
        self._append(kind, at, payload)

    def _report_dropped(self) -> None:
        if counts := self._dropped.take():
            self._append("left_out", None, counts)

    def _append(self, kind: str, at: float | None, payload: dict[str, Any]) -> None:
        self._seq += 1
        fields = {"kind": kind, "producer": "engine", "seq": self._seq, "time": time.time() if at is None else at, **payload}
        line = EVENT_ADAPTER.validate_python(fields).model_dump_json()
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        """Report dropped events, fsync and close."""
        self._report_dropped()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _truncate_partial_line(path: Path) -> int:
    """Remove a line that a crash left incomplete; returns the last event's number."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    if len(complete) < len(content):
        os.truncate(path, len(complete))
    lines = complete.splitlines()
    return parse_event(lines[-1]).seq if lines else 0
