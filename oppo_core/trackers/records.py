"""What trackers are told, read from the journal's lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Told besides the metrics: the other axes of a step.
AXES = ("elapsed_s", "generated_tokens", "device_seconds")


@dataclass(frozen=True, slots=True)
class Step:
    """A step's `metrics`, its axes among them; `time` in seconds since 1970.

    `before`: what was told of it earlier, where it is told again with more to it or other values.
    """

    number: int
    time: float
    metrics: dict[str, float]
    before: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answers:
    """Recorded answers of a step, each as the journal has it (`oppo_contract.events.Sample`)."""

    step: int
    time: float
    rows: list[dict[str, Any]]

    @property
    def of(self) -> str:
        """`samples`, or `held_out` for an evaluation's."""
        return "held_out" if self.rows and self.rows[0].get("held_out") else "samples"


def step_of(event: dict[str, Any]) -> Step:
    """Of a `step` event; what is not finite is spelt out there."""
    numbers = event["metrics"] | {axis: event[axis] for axis in AXES}
    return Step(event["step"], event["time"], {key: float(value) for key, value in numbers.items()})


def answers_of(event: dict[str, Any]) -> Answers:
    """Of a `samples` event."""
    return Answers(event["step"], event["time"], event["samples"])
