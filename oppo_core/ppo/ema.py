"""Exponential moving average (EMA) of the actor's weights (`ppo.ema_decay`), exported next to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from oppo_core.training.optimizer import Optimizer, tensor_bytes


class MovingAverage:
    """average ← decay · average + (1 − decay) · weights, after every PPO step that trains the actor.

    Initialized with the first weights, so it needs no bias correction. Stored in the precision of the optimizer's master weights.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self._optimizer = optimizer
        self._decay = decay
        self._weights = [weight.detach().clone() for weight in optimizer.masters]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after an optimizer step."""
        torch._foreach_lerp_(self._weights, [w.detach() for w in self._optimizer.masters], 1 - self._decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context manager in which the network has the averaged weights; restores its own weights exactly."""
        parameters = self._optimizer.parameters
        own = [parameter.data for parameter in parameters]
        for parameter, weight in zip(parameters, self._weights, strict=True):
            parameter.data = weight.to(parameter.dtype)
        try:
            yield
        finally:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data

    @property
    def saves_bytes(self) -> int:
        """Approximate size of `state`."""
        return tensor_bytes(self._weights)

    def state(self) -> dict[str, Tensor]:
        """The average by parameter index."""
        return {str(number): weight for number, weight in enumerate(self._weights)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for number, weight in enumerate(self._weights):
            weight.copy_(tensors[str(number)])
