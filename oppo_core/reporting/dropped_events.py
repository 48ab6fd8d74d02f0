"""Counts detail events dropped while the outbox is full, until a `left_out` event reports them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
