"""What a run remembers of a tracker between attempts: which of its runs it is, and how far it was told."""

from __future__ import annotations

import json
import math
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from oppo_core.trackers.records import Step


@dataclass(slots=True)
class Memory:
    """`run`: the id under which the tracker knows the run; `step`: the last one told, and its `metrics`.

    `settled`: steps up to this one are left as they were told, even if they are trained again.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    settled: int = 0

    def news(self, step: Step) -> Step | None:
        """What of `step` was not told yet, noted as told from now on: None for an earlier step, and for nothing new.

        A step may be told again with more to it, an evaluation that came after it, say.
        """
        if step.number < self.step or step.number <= self.settled:
            return None
        if step.number > self.step:
            self.step, self.metrics = step.number, dict(step.metrics)
            return step
        new = {key: value for key, value in step.metrics.items() if not _same(self.metrics.get(key), value)}
        before, self.metrics = self.metrics, self.metrics | new
        return Step(step.number, step.time, new, before) if new else None

    def go_back_to(self, step: int) -> None:
        """What comes after `step` will be told anew."""
        self.step, self.metrics, self.settled = step, {}, 0

    def leave_alone(self) -> None:
        """What was told so far stays as it is."""
        self.settled = self.step

    def copy(self) -> Memory:
        """One that can be changed on trial."""
        return Memory(self.run, self.step, dict(self.metrics), self.settled)

    def save(self, file: Path) -> None:
        """Write it, whole or not at all."""
        beside = file.with_name(file.name + ".new")
        beside.write_text(json.dumps(asdict(self)))
        beside.replace(file)


def remembered(file: Path) -> Memory:
    """What `file` holds; a new memory where there is none, or none that can be read."""
    try:
        return Memory(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return Memory()


def _same(old: float | None, new: float) -> bool:
    return old == new or (old is not None and math.isnan(old) and math.isnan(new))
