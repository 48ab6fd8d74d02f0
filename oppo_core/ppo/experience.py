"""Experience: a batch of answers with all inputs of the loss, padded to [B, T] response tokens."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.ppo.group_advantages import group_advantages
from oppo_core.ppo.losses import gae, importance_weights, kl_estimate, scale_to_unit_variance, shape_rewards, whiten
from oppo_core.ppo.reward_shaping import ScoreMoments, raw_scores, shaped_scores
from oppo_core.ppo.scored import Scored
from oppo_core.rollout.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Experience:
    """One PPO step's batch, all ranks' rows. Tensors are [B, T] float64 unless said otherwise; masked entries are 0."""

    sequences: list[Sequence]
    tokens: list[NDArray[np.int64]]
    prompt_lengths: list[int]
    mask: Tensor  # bool
    stale: Tensor  # bool: sampled under older weights, or with a KV cache of older weights
    behaviour_logp: Tensor
    proximal_logp: Tensor
    reference_logp: Tensor
    values: Tensor  # [B, 0] without a critic
    raw_scores: Tensor  # [B], from the reward model or rule
    moments: ScoreMoments  # of all raw scores so far, including these
    scores: Tensor  # [B], after normalization, scaling, penalties and clipping
    kl: Tensor  # log-ratio of proximal to reference policy (k1), whatever the penalty's estimator
    rewards: Tensor
    raw_advantages: Tensor
    advantages: Tensor
    returns: Tensor  # [B, 0] without a critic
    weights: Tensor
    own_rows: list[int] | None = None  # rows that this rank sampled and trains; None: all

    @property
    def own(self) -> list[int]:
        """Rows that this rank sampled and trains."""
        return list(range(len(self.sequences))) if self.own_rows is None else self.own_rows


def padded(rows: Rows[list[float] | NDArray[np.float64] | Tensor]) -> Tensor:
    """Ragged rows as float64 [B, T], right-padded with zeros."""
    width = max(len(row) for row in rows)
    out = torch.zeros(len(rows), width, dtype=torch.float64)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = torch.as_tensor(row, dtype=torch.float64)
    return out


def build_experience(
    batch: list[Sequence], proximal: list[Tensor], scored: list[Scored], ppo: Ppo, kl_coefficient: float, version: int,
    before: ScoreMoments,
) -> Experience:  # fmt: skip
    """Shape rewards and estimate advantages for a complete batch (docs/algorithm.md, step 4).

    Args:
        proximal: log-probs of each response under the weights at the start of the step.
        version: the actor's policy version; older tokens are stale.
        before: moments of all raw scores of earlier steps.

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    proximal_logp, behaviour_logp = padded(proximal), padded([s.behaviour_logprobs for s in batch])
    reference_logp, values = padded([s.reference_logprobs for s in scored]), padded([s.values for s in scored])
    lengths = torch.tensor([s.length for s in batch])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    stale = torch.arange(mask.shape[1]) < torch.tensor([s.stale_tokens(version) for s in batch])[:, None]
    # Reported as k1: unbiased like k3, in which one token of probability 1e-5 under the policy would count thousands of nats.
    kl = kl_estimate(proximal_logp, reference_logp, "k1") * mask
    penalty = kl_estimate(proximal_logp, reference_logp, ppo.kl.estimator) * mask
    raw_B = raw_scores(batch, scored)
    moments = before.updated(raw_B)
    scores = shaped_scores(raw_B, batch, ppo, moments)
    rewards = shape_rewards(scores, penalty, mask, kl_coefficient if ppo.kl.placement == "reward" else 0.0)
    rewards = scale_to_unit_variance(rewards, mask) if ppo.whiten_rewards else rewards
    raw, returns = advantages_and_returns(rewards, values, mask, ppo)
    corrected = {"off": torch.zeros_like(mask), "stale": stale, "all": mask}[ppo.tis]
    return Experience(
        sequences=batch, tokens=[s.tokens() for s in batch], prompt_lengths=[len(s.prompt) for s in batch],
        mask=mask, stale=stale, behaviour_logp=behaviour_logp, proximal_logp=proximal_logp, reference_logp=reference_logp,
        values=values, raw_scores=raw_B, moments=moments, scores=scores, kl=kl, rewards=rewards, raw_advantages=raw,
        advantages=whiten(raw, mask) if ppo.has_critic and ppo.whiten_advantages else raw, returns=returns,
        weights=importance_weights(
            proximal_logp, behaviour_logp, corrected, (ppo.tis_floor, ppo.tis_cap), ppo.tis_outside
        ) * mask,
    )  # fmt: skip


def advantages_and_returns(rewards: Tensor, values: Tensor, mask: Tensor, ppo: Ppo) -> tuple[Tensor, Tensor]:
    """Advantages [B, T] and the critic's targets; without a critic one advantage per answer and no targets."""
    if ppo.has_critic:
        return gae(rewards, values, mask, ppo.gamma, ppo.gae_lambda)
    return group_advantages(rewards.sum(-1), ppo)[:, None] * mask, torch.zeros_like(values)
