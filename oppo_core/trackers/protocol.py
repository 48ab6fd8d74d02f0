"""The interface of a tracker and the data sent to it. Implementations: `tensorboard`, `mlflow`, `wandb`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.cursor import Cursor

Log = Callable[[str], None]  # writes a message to the run's log


class RefusedError(Exception):
    """The tracker will never accept this data, so retries are useless."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step's `metrics`, including its other axes; `time` in seconds since 1970."""

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
    """A tracker's run, opened by the constructor with (config, cursor, log). Every call may block and may raise.

    `rewrites`: whether steps that are trained again replace the values sent before; otherwise they are not sent again.
    """

    rewrites: bool

    def log_steps(self, steps: list[Step]) -> None:
        """Log steps, oldest first; the first may have been logged before. Raises RefusedError."""

    def log_samples(self, samples: Samples) -> None:
        """Log recorded samples as text."""

    def close(self, outcome: str) -> None:
        """End the run with `succeeded`, `stopped` (a pause) or `failed`."""


OpenTracker = Callable[[TrackerConfig, Cursor, Log], Tracker]
