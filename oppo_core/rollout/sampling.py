"""Sampling whose randomness is a function of (seed, sequence_id, position), never of batch composition or timing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.upcast import precise
from oppo_core.rng import Use, generator

# Most of the mass nearly always lies in so few tokens; only where it does not, the whole vocabulary is sorted.
FIRST_LOOKS = (256, 4096)


def uniforms(seed: int, sequence_id: int, count: int, use: Use = Use.SAMPLING) -> NDArray[np.float64]:
    """The numbers in [0, 1) that sequence `sequence_id` will use for its first `count` response tokens.

    Philox is a counter-based generator: entry t depends on (seed, sequence_id, t) alone.
    """
    return generator(seed, use, sequence_id).random(count)


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
        highest_N1 = logits_NV.max(-1, keepdim=True).values
        if self.top_k is None and self.top_p is None:
            allowed_NV = torch.ones_like(logits_NV, dtype=torch.bool)
        else:
            allowed_NV = _likeliest(logits_NV, *self._left(logits_NV, highest_N1))
        if self.min_p is not None:
            allowed_NV &= logits_NV - highest_N1 >= math.log(self.min_p)
        return allowed_NV

    def _left(self, logits_NV: Tensor, highest_N1: Tensor) -> tuple[Tensor, Tensor]:
        """How many tokens top-k and top-p leave [N, 1], and the lowest logit among them [N, 1]."""
        vocab = logits_NV.shape[-1]
        for width in FIRST_LOOKS if self.top_k is None else ():
            if width < vocab:
                ordered_NW = logits_NV.topk(width, dim=-1).values
                left_N1 = self._mass_reached(ordered_NW, logits_NV, highest_N1)
                if int(left_N1.max()) < width:
                    return left_N1, ordered_NW.gather(-1, left_N1 - 1)
        ordered_NW = logits_NV.topk(min(self.top_k or vocab, vocab), dim=-1).values
        left_N1 = self._mass_reached(ordered_NW, logits_NV if self.top_k is None else ordered_NW, highest_N1)
        return left_N1, ordered_NW.gather(-1, left_N1 - 1)

    def _mass_reached(self, ordered_NW: Tensor, counted: Tensor, highest_N1: Tensor) -> Tensor:
        """How many of the W likeliest tokens reach `top_p` of the mass of all `counted` logits; W when they do not."""
        if self.top_p is None:
            return torch.full_like(highest_N1, ordered_NW.shape[-1], dtype=torch.long)
        mass_NW = (ordered_NW - highest_N1).double().exp()
        total_N1 = (counted - highest_N1).double().exp().sum(-1, keepdim=True)
        before_NW = mass_NW.cumsum(-1) - mass_NW
        return (before_NW < self.top_p * total_N1).sum(-1, keepdim=True).clamp_min(1)


def _likeliest(logits_NV: Tensor, left_N1: Tensor, lowest_N1: Tensor) -> Tensor:
    """The first `left` tokens of each row, of which the last has the logit `lowest`."""
    allowed_NV = logits_NV >= lowest_N1
    spare_N1 = allowed_NV.sum(-1, keepdim=True) - left_N1
    if bool((spare_N1 > 0).any()):
        tied_NV = logits_NV == lowest_N1
        allowed_NV &= ~tied_NV | (tied_NV.cumsum(-1) <= tied_NV.sum(-1, keepdim=True) - spare_N1)
    return allowed_NV


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
