"""An update that pauses before each optimizer step, so that `ppo.on_nonfinite: skip` can decide on both roles' gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from oppo_core.ppo.optimizer import NonFiniteError, Optimizer
from oppo_core.training.protocol import TrainingBackend


@dataclass(frozen=True, slots=True)
class Pause:
    """Where an update stands: `metrics` when it is complete, `fault` when something is not finite, else before a step."""

    metrics: dict[str, float] | None = None
    fault: str | None = None


class Stepwise:
    """One role's update of PPO step `step`, from 0.

    `gradients` gives a pause for each optimizer step, after its backward passes; `metrics` takes the gradient norms of all.
    """

    def __init__(
        self,
        optimizer: TrainingBackend,
        gradients: Generator[None],
        metrics: Callable[[list[float]], dict[str, float]],
        step: int,
        role: str,
    ) -> None:
        assert isinstance(optimizer, Optimizer)  # the spec has refused others
        self._optimizer = optimizer
        self._gradients = gradients
        self._metrics = metrics
        self._step, self._role = step, role
        self._norms: list[float] = []
        self._is_ready = False
        self._pause = Pause()

    def advance(self) -> Pause:
        """Take the optimizer step that is ready, if one is, then compute the gradients and the norm of the next one."""
        if self._pause.metrics is not None:
            return self._pause
        if self._is_ready:
            self._optimizer.take_step(self._step)
        try:
            self._is_ready = next(self._gradients, self) is None
            if self._is_ready:
                self._norms.append(self._optimizer.clip(self._step, self._role))
            else:
                self._pause = Pause(metrics=self._metrics(self._norms))
        except NonFiniteError as error:
            return Pause(fault=str(error))
        return self._pause

    def discard(self) -> None:
        """Leave out what has not been stepped: no weight and no moment changes any more."""
        self._gradients.close()
        self._optimizer.zero_grad()
