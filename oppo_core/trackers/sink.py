"""What a tracker must be able to do. One module each: `tensorboard`, `mlflow`, `wandb`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oppo_core.trackers.memory import Memory
from oppo_core.trackers.order import Order
from oppo_core.trackers.records import Answers, Step

Say = Callable[[str], None]


class RefusedError(Exception):
    """The tracker will never take this; there is no use in trying again."""


class Sink(Protocol):
    """A tracker's run, opened in its constructor, which takes (order, memory, say); every call may wait and may fail.

    `rewrites`: whether steps that are trained again take the place of what was told before. Otherwise they are left alone.
    """

    rewrites: bool

    def tell(self, steps: list[Step]) -> None:
        """Metrics of some steps, oldest first. Raises RefusedError for what it will never take; may be told the same twice."""

    def show(self, answers: Answers) -> None:
        """Recorded answers, as text."""

    def close(self, outcome: str) -> None:
        """The end, or a pause: `succeeded`, `stopped` or `failed`."""


Opening = Callable[[Order, Memory, Say], Sink]
