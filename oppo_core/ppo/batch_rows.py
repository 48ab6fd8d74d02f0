"""The rows of a step's batch over all ranks: which of them this rank trains, and statistics over all of them.

A rank has the tokens of its own rows only. One number per row is gathered, and sums over tokens are all-reduced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.ppo.losses import Whitening, unit_scale
from oppo_core.rollout.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BatchRows:
    """`sequences`: the B rows of all ranks in sequence_id order. The methods are collective, the properties are not."""

    sequences: list[Sequence]
    ranks: Ranks = SINGLE

    @property
    def places(self) -> list[int]:
        """Where this rank's N rows are in the batch."""
        return [place for place, sequence in enumerate(self.sequences) if sequence.remote_length is None]

    @property
    def own(self) -> list[Sequence]:
        """This rank's rows."""
        return [sequence for sequence in self.sequences if sequence.remote_length is None]

    @property
    def tokens(self) -> int:
        """Response tokens of all rows."""
        return sum(sequence.length for sequence in self.sequences)

    def gather(self, own: Tensor) -> Tensor:
        """Numbers [B, …] of all rows, from those of this rank's rows [N, …]; float64."""
        if self.ranks.world == 1:
            return own.double()
        table = torch.zeros(len(self.sequences), *own.shape[1:], dtype=torch.float64)
        table[self.places] = own.double()
        return torch.tensor(self.ranks.total(table.flatten().tolist()), dtype=torch.float64).view_as(table)

    def mean(self, values: Tensor) -> float:
        """Mean over all ranks' values; NaN for none."""
        total, count = self.ranks.total([float(values.double().sum()), values.numel()])
        return total / count if count else math.nan

    def variance(self, values: Tensor, unbiased: bool = False) -> float:
        """Variance over all ranks' values; 0 for fewer than two."""
        mean = self.mean(values)
        squares, count = self.ranks.total([float((values.double() - mean).square().sum()), values.numel()])
        return squares / (count - unbiased) if count > 1 else 0.0

    def whitening(self, values: Tensor) -> Whitening:
        """Mean of all ranks' values, and the factor that scales them to unit (unbiased) variance."""
        return self.mean(values), unit_scale(self.variance(values, unbiased=True))

    def largest(self, values: Tensor) -> float:
        """Maximum over all ranks' values; −∞ for none."""
        return self.ranks.largest([float(values.max()) if values.numel() else -math.inf])[0]

    def effective_share(self, weights: Tensor) -> float:
        """Effective sample size ÷ number of samples, (Σw)² / (n Σw²): 1 when all weights are equal, 0 when all are 0."""
        mean, square = self.mean(weights), self.mean(weights.square())
        return mean * mean / square if square else 0.0

    def spread(self, name: str, values: Tensor) -> dict[str, float]:
        """mean, max and min of all ranks' values under `name/…`."""
        return {
            f"{name}/mean": self.mean(values), f"{name}/max": self.largest(values), f"{name}/min": -self.largest(-values),
        }  # fmt: skip
