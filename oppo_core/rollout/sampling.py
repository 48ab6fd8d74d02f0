"""Sampling whose randomness is a function of (seed, sequence_id, position), never of batch composition or timing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.precision import precise
from oppo_core.randomness import Use, generator

# Most of the mass nearly always lies in so few tokens; where it does not, the whole vocabulary is sorted.
FIRST_LOOK = 256


def uniforms(seed: int, sequence_id: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) that sequence `sequence_id` will use for its first `count` response tokens.

    Philox is a counter-based generator: entry t depends on (seed, sequence_id, t) alone.
    """
    return generator(seed, Use.SAMPLING, sequence_id).random(count)


def sample(logits_NV: Tensor, uniform_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the distribution's cumulative sum.

    Returns:
        tokens [N] and their log-probs [N] under the tempered distribution, in the logits' dtype, float32 at least.
    """
    return _drawn(precise(logits_NV) / temperature, uniform_N)


@dataclass(frozen=True, slots=True)
class Filters:
    """Which tokens may be sampled at all. All three leave the first n tokens in order of (probability, lower id first).

    Together they leave the fewest that any of them leaves; `top_p` counts the mass of what `top_k` has left.
    """

    top_k: int | None
    top_p: float | None
    min_p: float | None

    def allowed(self, logits_NV: Tensor) -> Tensor:
        """[N, V] booleans for tempered logits [N, V]; at least one True a row. Equal logits count by id: lower ids first."""
        left_N1, lowest_N1 = self._left(logits_NV)
        above = logits_NV > lowest_N1
        tied = logits_NV == lowest_N1
        room_N1 = left_N1 - above.sum(-1, keepdim=True)
        return above | (tied & (tied.cumsum(-1) <= room_N1))

    def _left(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """How many tokens are left [N, 1], and the lowest logit among them [N, 1]."""
        vocab = logits_NV.shape[-1]
        most = min(self.top_k or vocab, vocab)
        for width in (most,) if self.top_k else (min(FIRST_LOOK, most), most):
            ordered_NW = logits_NV.topk(width, dim=-1).values
            left_N1 = self._count(ordered_NW, logits_NV)
            if int(left_N1.max()) < width:
                break
        return left_N1, ordered_NW.gather(-1, left_N1 - 1)

    def _count(self, ordered_NW: Tensor, logits_NV: Tensor) -> Tensor:
        """Tokens left [N, 1] as far as the W likeliest tell, which `ordered_NW` holds; W may mean more, unless `top_k` is W."""
        width = ordered_NW.shape[-1]
        left_N1 = torch.full_like(ordered_NW[:, :1], width, dtype=torch.long)
        highest_N1 = ordered_NW[:, :1]
        if self.top_p is not None:
            mass_NW = (ordered_NW - highest_N1).double().exp()
            counted = ordered_NW if self.top_k is not None else logits_NV
            total_N1 = (counted - highest_N1).double().exp().sum(-1, keepdim=True)
            before_NW = mass_NW.cumsum(-1) - mass_NW
            left_N1 = torch.minimum(left_N1, (before_NW < self.top_p * total_N1).sum(-1, keepdim=True))
        if self.min_p is not None:
            likely_NW = ordered_NW - highest_N1 >= math.log(self.min_p)
            left_N1 = torch.minimum(left_N1, likely_NW.sum(-1, keepdim=True))
        return left_N1.clamp_min(1)


def sample_among(logits_NV: Tensor, uniform_N: Tensor, temperature: float, filters: Filters) -> tuple[Tensor, Tensor, Tensor]:
    """Like `sample`, among the tokens that `filters` leave, their probabilities renormalised.

    Returns:
        tokens [N], their log-probs [N] under the renormalised distribution, and what was left as [N, V] booleans.
    """
    tempered_NV = precise(logits_NV) / temperature
    allowed_NV = filters.allowed(tempered_NV)
    tempered_NV = tempered_NV.masked_fill(~allowed_NV, torch.finfo(tempered_NV.dtype).min)
    return *_drawn(tempered_NV, uniform_N), allowed_NV


def _drawn(tempered_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    logp_NV = torch.log_softmax(tempered_NV, dim=-1)
    cumulative_NV = logp_NV.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the total, so that rounding can never leave the last token out of reach.
    threshold_N1 = uniform_N[:, None] * cumulative_NV[:, -1:]
    tokens_N = torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(-1).clamp_max(tempered_NV.shape[-1] - 1)
    return tokens_N, logp_NV.gather(-1, tokens_N[:, None]).squeeze(-1)
