"""What is sent to trackers, and what a tracker must be able to do. One module each: `tensorboard`, `mlflow`, `wandb`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.cursor import Cursor

Say = Callable[[str], None]  # takes a sentence for the run's log


class RefusedError(Exception):
    """The tracker will never take this; another try is of no use."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step's `metrics`, its other axes among them; `time` in seconds since 1970."""

    number: int
    time: float
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Samples:
    """Recorded samples of a step, each as in the event log (`oppo_contract.events.Sample`)."""

    step: int
    time: float
    rows: list[dict[str, Any]]

    @property
    def kind(self) -> str:
        """`samples`, or `held_out` for an evaluation's."""
        return "held_out" if self.rows and self.rows[0].get("held_out") else "samples"


class Tracker(Protocol):
    """A tracker's run, opened in its constructor, which takes (config, cursor, say); every call may wait and may fail.

    `rewrites`: whether steps that are trained again replace what was sent before. Otherwise they are not sent again.
    """

    rewrites: bool

    def log_steps(self, steps: list[Step]) -> None:
        """Metrics of some steps, oldest first; the first may come again. Raises RefusedError for what it will never take."""

    def log_samples(self, samples: Samples) -> None:
        """Recorded samples, as text."""

    def close(self, outcome: str) -> None:
        """The end, or a pause: `succeeded`, `stopped` or `failed`."""


OpenTracker = Callable[[TrackerConfig, Cursor, Say], Tracker]
