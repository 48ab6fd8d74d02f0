"""A moving average of the actor's weights (`ppo.ema_decay`): smoother than any one step's, to be exported beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from oppo_core.ppo.optimizer import Optimizer, size_of


class MovingAverage:
    """average ← decay · average + (1 − decay) · weights, after every PPO step that trained the actor.

    It begins as the first weights, so there is no bias to correct. Kept in the precision in which the optimizer keeps them.
    """

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        self._optimizer = optimizer
        self._decay = decay
        self._weights = [weight.detach().clone() for weight in optimizer.masters]

    @torch.no_grad()
    def follow(self) -> None:
        """The weights have taken a step."""
        torch._foreach_lerp_(self._weights, [w.detach() for w in self._optimizer.masters], 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the network has the average's weights; afterwards its own again, to the bit."""
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
        """About how much `state` holds."""
        return size_of(self._weights)

    def state(self) -> dict[str, Tensor]:
        """The average by weight number."""
        return {str(number): weight for number, weight in enumerate(self._weights)}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        for number, weight in enumerate(self._weights):
            weight.copy_(tensors[str(number)])
