"""PPO's equations (GAE, advantage whitening, policy and value loss, KL) on padded tensors [B, T]: B sequences, T response tokens.

Sources: PPO (arXiv 1707.06347), GAE (arXiv 1506.02438), KL estimators (Schulman, "Approximating KL divergence"), truncated
importance weights and the proximal policy (docs/algorithm.md). Rewards and advantages are computed in float64.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
WHITEN_EPS = 1e-8
KlEstimator = Literal["k1", "k2", "k3", "k3+"]
Outside = Literal["clamp", "mask", "reject"]
Whitening = tuple[float, float]  # mean of all tokens' values, and the factor that scales them to unit variance
UNCHANGED: Whitening = (0.0, 1.0)


def kl_estimate(logp: Tensor, reference_logp: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), nats, same shape; log-ratios clamped to ±20.

    k1 = log-ratio; k2 = half its square; k3 = exp(−log-ratio) − 1 + log-ratio (unbiased, never negative). As a loss, with tokens
    sampled by the policy: the expected gradient of k1 is 0; that of k2 is the gradient of the KL divergence; that of k3 is the
    gradient of the reverse divergence, KL(reference ‖ policy). k3+ has the value of k3 and the gradient of k2.
    """
    log_ratio = (logp - reference_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    k3 = torch.exp(-log_ratio) - 1 + log_ratio
    if estimator == "k3":
        return k3
    k2 = 0.5 * log_ratio.square()
    return k2 + (k3 - k2).detach()


def shape_rewards(scores_N: Tensor, kl_NT: Tensor, mask_NT: Tensor, coefficient: float) -> Tensor:
    """Per-token rewards [N, T]: −coefficient × KL per token, plus the score on the last token."""
    rewards = -coefficient * kl_NT * mask_NT
    last = mask_NT.long().sum(-1) - 1
    rewards[torch.arange(len(scores_N)), last] += scores_N
    return rewards


def scale_to_unit_variance(rewards_BT: Tensor, mask_BT: Tensor, whitening: Whitening) -> Tensor:
    """Scale to unit (unbiased) variance over all tokens of the batch, keeping the mean; masked entries are unchanged."""
    mean, scale = whitening
    return torch.where(mask_BT, (rewards_BT - mean) * scale + mean, rewards_BT)


def gae(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, no bootstrap beyond the last token.

    Returns:
        advantages and returns [B, T], 0 where masked; returns = advantages + values, unwhitened.
    """
    mask = mask_BT.to(values_BT.dtype)
    values = values_BT * mask
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = ((rewards_BT + gamma * following - values) * mask).T.contiguous().numpy()
    carried = deltas.copy()
    for t in range(len(deltas) - 2, -1, -1):
        carried[t] += gamma * lam * carried[t + 1]
    advantages = torch.from_numpy(carried).T * mask
    return advantages, (advantages + values) * mask


def whiten(values_BT: Tensor, mask_BT: Tensor, whitening: Whitening) -> Tensor:
    """Zero mean, unit (unbiased) variance over all tokens of the batch; one token alone becomes 0."""
    mean, scale = whitening
    return (values_BT - mean) * scale * mask_BT


def unit_scale(variance: float) -> float:
    """The factor that scales values of this variance to unit variance."""
    return 1 / math.sqrt(variance + WHITEN_EPS)


def importance_weights(
    proximal_logp: Tensor, behaviour_logp: Tensor, corrected: Tensor, bounds: tuple[float, float], outside: Outside = "clamp"
) -> Tensor:
    """Importance weights [B, T]: exp(proximal − behaviour) within `bounds` where `corrected`, else 1. Detached by construction.

    A ratio outside the bounds is clamped,
    masked (weight 0: IcePop), or, with `reject`, all tokens of a response have weight 0 if the geometric mean of its corrected
    tokens' ratios is outside; other responses are clamped.
    """
    log_ratio = (proximal_logp - behaviour_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio, (low, high) = torch.exp(log_ratio), bounds
    weights = torch.where(corrected, ratio.clamp(low, high), torch.ones_like(ratio))
    if outside == "mask":
        return torch.where(corrected & ((ratio < low) | (ratio > high)), torch.zeros_like(ratio), weights)
    if outside == "reject":
        mean = torch.exp((log_ratio * corrected).sum(-1) / corrected.sum(-1).clamp_min(1))
        return weights * ((mean >= low) & (mean <= high))[:, None]
    return weights


def policy_loss(
    logp: Tensor, proximal_logp: Tensor, advantages: Tensor, weights: Tensor, clip: tuple[float, float], dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate loss per token (to be minimised), and the mask of clipped tokens, both in the input shape.

    `clip`: ε below and above 1 (the second is larger in DAPO's clip-higher, arXiv 2503.14476 §3.1). With `dual_clip` c the loss
    of a token with negative advantage is at most c·|A| (arXiv 1912.09729).
    """
    ratio = torch.exp((logp - proximal_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip[0], 1 + clip[1])
    loss = torch.maximum(plain, clipped)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
    return loss * weights, (clipped > plain).detach()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """0.5 × max(unclipped, clipped) squared error per token, and the mask of clipped tokens."""
    plain = (values - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    near = values.clamp(
        old_values - clip, old_values + clip
    )  # equals `values` exactly within the range, so rounding is not counted as clipping
    clipped = (near - returns).square()
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).detach()


def adapted_kl_coefficient(coefficient: float, kl_per_token: float, target: float, sequences: int, horizon: int) -> float:
    """Ziegler et al.'s proportional controller (arXiv 1909.08593, §2.2), on the mean KL per token."""
    error = min(max(kl_per_token / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * sequences / horizon)
