"""An update that pauses before each optimizer step, so that `ppo.on_nonfinite: skip` can check both roles' gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from oppo_core.training.optimizer import NonFiniteError, Optimizer
from oppo_core.training.protocol import TrainingBackend


@dataclass(frozen=True, slots=True)
class Pause:
    """State of a paused update: `metrics` if complete, `fault` if non-finite, else an optimizer step is pending."""

    metrics: dict[str, float] | None = None
    fault: str | None = None


class Stepwise:
    """One role's update in PPO step `step` (from 0).

    `gradients` yields once per optimizer step, after its backward passes; `metrics` takes the gradient norms of all steps.
    """

    def __init__(
        self,
        optimizer: TrainingBackend,
        gradients: Generator[None],
        metrics: Callable[[list[float]], dict[str, float]],
        step: int,
        role: str,
    ) -> None:
        assert isinstance(optimizer, Optimizer)  # enforced by spec validation
        self._optimizer = optimizer
        self._gradients = gradients
        self._metrics = metrics
        self._step, self._role = step, role
        self._norms: list[float] = []
        self._is_pending = False
        self._pause = Pause()

    def advance(self) -> Pause:
        """Take the pending optimizer step, if any, then compute the gradients and norm of the next one."""
        if self._pause.metrics is not None:
            return self._pause
        if self._is_pending:
            self._optimizer.take_step(self._step)
        try:
            self._is_pending = next(self._gradients, self) is None
            if self._is_pending:
                self._norms.append(self._optimizer.clip(self._step, self._role))
            else:
                self._pause = Pause(metrics=self._metrics(self._norms))
        except NonFiniteError as error:
            return Pause(fault=str(error))
        return self._pause

    def discard(self) -> None:
        """Discard the pending step and all later ones; weights and moments no longer change."""
        self._gradients.close()
        self._optimizer.zero_grad()
