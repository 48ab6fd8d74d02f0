"""Score shaping: from an answer's raw score to the reward on its last token (docs/algorithm.md, "From score to reward").

In this order: normalization by the running moments of raw scores, scaling, penalties, clipping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.losses import WHITEN_EPS
from oppo_core.ppo.scored import Scored
from oppo_core.rollout.sequence import Sequence
from oppo_core.training.optimizer import NonFiniteError


@dataclass(frozen=True, slots=True)
class ScoreMoments:
    """Running moments of all raw scores trained so far: count, mean, and sum of squared deviations from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def deviation(self) -> float:
        """Unbiased standard deviation; 1 while there are fewer than two scores."""
        return math.sqrt(self.squares / (self.count - 1) + WHITEN_EPS) if self.count > 1 else 1.0

    def updated(self, scores: Tensor) -> ScoreMoments:
        """Moments including the scores [B] of another batch, merged by the parallel variance formula."""
        count = self.count + len(scores)
        mean, squares = float(scores.mean()), float((scores - scores.mean()).square().sum())
        delta, share = mean - self.mean, len(scores) / count
        return ScoreMoments(count, self.mean + delta * share, self.squares + squares + delta * delta * self.count * share)


def raw_scores(rows: BatchRows, scored: list[Scored]) -> Tensor:
    """Scores of all rows from the reward model or rule, [B] float64. `scored`: this rank's rows. Collective.

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    raw_B = rows.gather(torch.tensor([row.score for row in scored], dtype=torch.float64))
    for sequence, score in zip(rows.sequences, raw_B.tolist(), strict=True):
        if not math.isfinite(score):
            raise NonFiniteError(f"the score of sequence {sequence.sequence_id} is {score}; look at the reward model or rule")
    return raw_B


def shaped_scores(raw_B: Tensor, batch: list[Sequence], ppo: Ppo, moments: ScoreMoments) -> Tensor:
    """Shaped scores [B] float64; `moments` (used with `normalize_scores`) must include this batch."""
    scores = raw_B if ppo.normalize_scores == "off" else (raw_B - moments.mean) / moments.deviation
    lengths = torch.tensor([s.length for s in batch], dtype=torch.float64)
    truncated = torch.tensor([not s.ended_by_eos for s in batch], dtype=torch.float64)
    excess = (lengths - ppo.length_penalty_from).clamp_min(0)
    scores = ppo.score_scale * scores - ppo.missing_eos_penalty * truncated - ppo.length_penalty * excess
    return scores if ppo.score_clip is None else scores.clamp(-ppo.score_clip, ppo.score_clip)
