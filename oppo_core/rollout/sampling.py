"""Token sampling (temperature, top-k, top-p, min-p) with random numbers keyed by (seed, sequence_id, position)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.upcast import precise
from oppo_core.rng import Use, generator

# Sizes of `topk` to try for top-p before sorting the whole vocabulary: few tokens nearly always hold the mass.
TOPK_WIDTHS = (256, 4096)


def uniforms(seed: int, sequence_id: int, count: int, use: Use = Use.SAMPLING) -> NDArray[np.float64]:
    """Random numbers in [0, 1) for the first `count` response tokens of a sequence.

    Philox is a counter-based generator: entry t depends only on (seed, sequence_id, t).
    """
    return generator(seed, use, sequence_id).random(count)


def sample(logits_NV: Tensor, uniform_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverse transform sampling.

    Returns:
        tokens [N] and their log-probs [N] after temperature, in the logits' dtype, at least float32.
    """
    return _draw(precise(logits_NV) / temperature, uniform_N)


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling filters. Each keeps the first n tokens in order of (probability, lower id first).

    Together they keep the smallest of these sets; `top_p` counts the mass of the tokens that `top_k` keeps.
    """

    top_k: int | None
    top_p: float | None
    min_p: float | None

    def allowed(self, logits_NV: Tensor) -> Tensor:
        """Boolean mask [N, V] for tempered logits [N, V]; at least one True per row. Ties go to the lower id."""
        highest_N1 = logits_NV.max(-1, keepdim=True).values
        if self.top_k is None and self.top_p is None:
            allowed_NV = torch.ones_like(logits_NV, dtype=torch.bool)
        else:
            allowed_NV = _top_tokens(logits_NV, *self._cutoff(logits_NV, highest_N1))
        if self.min_p is not None:
            allowed_NV &= logits_NV - highest_N1 >= math.log(self.min_p)
        return allowed_NV

    def _cutoff(self, logits_NV: Tensor, highest_N1: Tensor) -> tuple[Tensor, Tensor]:
        """Number of tokens that top-k and top-p keep [N, 1], and the lowest logit among them [N, 1]."""
        vocab = logits_NV.shape[-1]
        for width in TOPK_WIDTHS if self.top_k is None else ():
            if width < vocab:
                ordered_NW = logits_NV.topk(width, dim=-1).values
                kept_N1 = self._nucleus_size(ordered_NW, logits_NV, highest_N1)
                if int(kept_N1.max()) < width:
                    return kept_N1, ordered_NW.gather(-1, kept_N1 - 1)
        ordered_NW = logits_NV.topk(min(self.top_k or vocab, vocab), dim=-1).values
        kept_N1 = self._nucleus_size(ordered_NW, logits_NV if self.top_k is None else ordered_NW, highest_N1)
        return kept_N1, ordered_NW.gather(-1, kept_N1 - 1)

    def _nucleus_size(self, ordered_NW: Tensor, counted: Tensor, highest_N1: Tensor) -> Tensor:
        """Number of the W most likely tokens that reach `top_p` of the mass of `counted` logits; W if they do not."""
        if self.top_p is None:
            return torch.full_like(highest_N1, ordered_NW.shape[-1], dtype=torch.long)
        mass_NW = (ordered_NW - highest_N1).double().exp()
        total_N1 = (counted - highest_N1).double().exp().sum(-1, keepdim=True)
        before_NW = mass_NW.cumsum(-1) - mass_NW
        return (before_NW < self.top_p * total_N1).sum(-1, keepdim=True).clamp_min(1)


def _top_tokens(logits_NV: Tensor, kept_N1: Tensor, lowest_N1: Tensor) -> Tensor:
    """Mask of the first `kept` tokens of each row; `lowest` is the logit of the last one."""
    allowed_NV = logits_NV >= lowest_N1
    spare_N1 = allowed_NV.sum(-1, keepdim=True) - kept_N1
    if bool((spare_N1 > 0).any()):
        tied_NV = logits_NV == lowest_N1
        allowed_NV &= ~tied_NV | (tied_NV.cumsum(-1) <= tied_NV.sum(-1, keepdim=True) - spare_N1)
    return allowed_NV


def sample_filtered(logits_NV: Tensor, uniform_N: Tensor, temperature: float, filters: Filters) -> tuple[Tensor, Tensor, Tensor]:
    """Like `sample`, among the tokens that `filters` keep, with renormalised probabilities.

    Returns:
        tokens [N], their log-probs [N] under the renormalised distribution, and the mask of kept tokens [N, V].
    """
    tempered_NV = precise(logits_NV) / temperature
    allowed_NV = filters.allowed(tempered_NV)
    tempered_NV = tempered_NV.masked_fill(~allowed_NV, torch.finfo(tempered_NV.dtype).min)
    return *_draw(tempered_NV, uniform_N), allowed_NV


def _draw(tempered_NV: Tensor, uniform_N: Tensor) -> tuple[Tensor, Tensor]:
    logp_NV = torch.log_softmax(tempered_NV, dim=-1)
    cumulative_NV = logp_NV.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the total, so that rounding cannot make the last token unreachable.
    threshold_N1 = uniform_N[:, None] * cumulative_NV[:, -1:]
    tokens_N = torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(-1).clamp_max(tempered_NV.shape[-1] - 1)
    return tokens_N, logp_NV.gather(-1, tokens_N[:, None]).squeeze(-1)
