"""What an update tells of its passes, left where it was computed until all of them are launched.

Looking at a number on a GPU makes the host wait for everything that is queued before it, and the GPU then waits for the host's
next launch. So losses and counts are looked at together, once a mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Figures:
    """Numbers of each pass of a mini-batch, in the order in which they were noted."""

    def __init__(self) -> None:
        self._passes: list[Tensor] = []

    def note(self, *figures: Tensor) -> None:
        """Keep a pass's figures, tensors of one number each."""
        self._passes.append(torch.stack([figure.detach().double() for figure in figures]))

    def read(self) -> list[list[float]]:
        """All passes' figures; the host waits for the last one, once."""
        passes: list[list[float]] = torch.stack(self._passes).tolist() if self._passes else []
        return passes
