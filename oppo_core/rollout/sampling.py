"""Sampling whose randomness is a function of (seed, sequence_id, position), never of batch composition or timing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.precision import precise


def uniforms(seed: int, sequence_id: int, count: int) -> NDArray[np.float64]:
    """The numbers in [0, 1) that sequence `sequence_id` will use for its first `count` response tokens.

    Philox is a counter-based generator: entry t depends on (seed, sequence_id, t) alone.
    """
    return np.random.Generator(np.random.Philox(key=[seed, sequence_id])).random(count)


def sample(logits_NV: Tensor, uniform_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row by inverting the distribution's cumulative sum.

    Returns:
        tokens [N] and their log-probs [N] under the tempered distribution, in the logits' dtype, float32 at least.
    """
    logp_NV = torch.log_softmax(precise(logits_NV) / temperature, dim=-1)
    cumulative_NV = logp_NV.exp().cumsum(-1, dtype=torch.float64)
    # Scaled by the total, so that rounding can never leave the last token out of reach.
    threshold_N1 = uniform_N[:, None] * cumulative_NV[:, -1:]
    tokens_N = torch.searchsorted(cumulative_NV, threshold_N1, right=True).squeeze(-1).clamp_max(logits_NV.shape[-1] - 1)
    return tokens_N, logp_NV.gather(-1, tokens_N[:, None]).squeeze(-1)
