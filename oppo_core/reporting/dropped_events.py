"""What the journal has left out while the outbox was full, until it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LeftOut:
    """Counts of one spell in which the outbox was full."""

    steps: int = 0  # in this spell, told or not
    last_step: int = -1
    untold: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, payload: dict[str, Any]) -> int:
        """Note an event that is not written. Returns which step of the spell it belongs to, from 1; 0 when none is new.

        Lines of the log belong to the step of the event before.
        """
        step = int(payload.get("step", max(self.last_step, 0)))
        new = step != self.last_step
        self.last_step = step
        self.steps += new
        told = self.untold or {"from_step": step, "to_step": step, "timelines": 0, "answers": 0, "lines": 0}
        told["from_step"], told["to_step"] = min(told["from_step"], step), max(told["to_step"], step)
        told["timelines"] += kind == "spans"
        told["answers"] += len(payload.get("samples", ()))
        told["lines"] += len(payload.get("lines", ()))
        self.untold = told
        return self.steps if new else 0

    def take(self) -> dict[str, int] | None:
        """The counts since the last time, for an event; None when nothing was left out."""
        told, self.untold = self.untold, {}
        return told or None
