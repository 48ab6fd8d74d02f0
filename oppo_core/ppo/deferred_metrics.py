"""Metrics of an update's passes, kept on the device until all passes are launched.

Reading a number from a GPU synchronizes with everything queued before it, and then leaves the GPU idle until the next launch.
So losses and counts are read together, once per mini-batch.
"""

from __future__ import annotations

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
