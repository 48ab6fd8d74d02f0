"""Metrics of an update's passes, kept on the device until all passes are launched, and their sums.

Reading a number from a GPU synchronizes with everything queued before it, and then leaves the GPU idle until the next launch.
So losses and counts are read together, once per mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class DeferredMetrics:
    """Metrics of each pass of a mini-batch, in the order recorded."""

    def __init__(self) -> None:
        self._passes: list[Tensor] = []

    def record(self, *metrics: Tensor) -> None:
        """Record a pass's metrics, scalar tensors."""
        self._passes.append(torch.stack([metric.detach().double() for metric in metrics]))

    def read(self) -> list[list[float]]:
        """Metrics of all passes; synchronizes once."""
        passes: list[list[float]] = torch.stack(self._passes).tolist() if self._passes else []
        return passes


@dataclass(slots=True)
class TokenSums:
    """Sums over the tokens of one update, divided at the end. `divisor`: of the loss, see `ppo.loss_aggregation`."""

    tokens: int = 0
    divisor: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    log_ratio: float = 0.0
    entropy: float = 0.0
    texts: float = 0.0
    text_tokens: int = 0

    def add(self, loss: float, clipped: float, log_ratio: float, entropy: float) -> None:
        """Add the sums of one pass."""
        self.loss += loss
        self.clipped += clipped
        self.log_ratio += log_ratio
        self.entropy += entropy
