"""From the raw score of an answer to the one that stands on its last token (docs/algorithm.md, "From score to reward").

In this order: normalised by what raw scores were so far, scaled, less the penalties, clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.ppo.losses import WHITEN_EPS
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.results import Scored


@dataclass(frozen=True, slots=True)
class ScoreMoments:
    """Of all raw scores trained so far: their number, mean, and sum of squared distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 1 while there are fewer than two scores."""
        return math.sqrt(self.squares / (self.count - 1) + WHITEN_EPS) if self.count > 1 else 1.0

    def after(self, scores: Tensor) -> ScoreMoments:
        """With the scores [B] of one more batch (the two sets' moments merged, without a sum of raw squares)."""
        count = self.count + len(scores)
        mean, squares = float(scores.mean()), float((scores - scores.mean()).square().sum())
        apart, share = mean - self.mean, len(scores) / count
        return ScoreMoments(count, self.mean + apart * share, self.squares + squares + apart * apart * self.count * share)


def raw_scores(batch: list[Sequence], scored: list[Scored]) -> Tensor:
    """What the reward model or rule said, [B] float64.

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    for sequence, row in zip(batch, scored, strict=True):
        if not math.isfinite(row.score):
            raise NonFiniteError(f"the score of sequence {sequence.sequence_id} is {row.score}; look at the reward model or rule")
    return torch.tensor([row.score for row in scored], dtype=torch.float64)


def shaped_scores(raw_B: Tensor, batch: list[Sequence], ppo: Ppo, moments: ScoreMoments) -> Tensor:
    """Scores [B] float64 as they are trained on; `moments` (used when `normalize_scores` is on) include this batch."""
    scores = raw_B if ppo.normalize_scores == "off" else (raw_B - moments.mean) / moments.deviation
    lengths = torch.tensor([s.length for s in batch], dtype=torch.float64)
    cut = torch.tensor([not s.ended_by_eos for s in batch], dtype=torch.float64)
    beyond = (lengths - ppo.length_penalty_from).clamp_min(0)
    scores = ppo.score_scale * scores - ppo.missing_eos_penalty * cut - ppo.length_penalty * beyond
    return scores if ppo.score_clip is None else scores.clamp(-ppo.score_clip, ppo.score_clip)
