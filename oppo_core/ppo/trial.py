"""An update that can be taken back: with `ppo.on_nonfinite` other than raise, either both roles move in a step or neither."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from oppo_core.ppo.optimizer import NonFiniteError, Optimizer
from oppo_core.training.protocol import TrainingBackend


@dataclass(frozen=True, slots=True)
class Trial:
    """How an update went: its metrics, or what was not finite."""

    metrics: dict[str, float] = field(default_factory=dict)
    fault: str | None = None


def attempt(optimizer: TrainingBackend, train: Callable[[], dict[str, float]]) -> Trial:
    """Remember weights and moments, then `train`. Whatever comes of it, `settle` decides."""
    assert isinstance(optimizer, Optimizer)  # the spec has refused others
    optimizer.remember()
    try:
        return Trial(train())
    except NonFiniteError as error:
        return Trial(fault=str(error))


def settle(optimizer: TrainingBackend, keep: bool) -> None:
    """Keep the update, or put every weight and moment back, to the bit."""
    assert isinstance(optimizer, Optimizer)
    if keep:
        optimizer.forget()
    else:
        optimizer.take_back()
