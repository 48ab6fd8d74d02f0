"""Experience: this rank's rows of a batch with all inputs of the loss, padded to [N, T] response tokens."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.group_advantages import group_advantages
from oppo_core.ppo.losses import (
    UNCHANGED,
    Whitening,
    gae,
    importance_weights,
    kl_estimate,
    scale_to_unit_variance,
    shape_rewards,
    whiten,
)
from oppo_core.ppo.reward_shaping import ScoreMoments, raw_scores, shaped_scores
from oppo_core.ppo.scored import Scored
from oppo_core.rollout.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Experience:
    """One PPO step's batch on one rank: N of the B rows of all ranks.

    Tensors are [N, T] float64 unless said otherwise; masked entries are 0. Those marked [B] are of all rows, in the order of the
    batch.
    """

    batch: BatchRows
    sequences: list[Sequence]  # this rank's
    tokens: list[NDArray[np.int64]]
    prompt_lengths: list[int]
    mask: Tensor  # bool
    stale: Tensor  # bool: sampled under older weights, or with a KV cache of older weights
    behaviour_logp: Tensor
    proximal_logp: Tensor
    reference_logp: Tensor
    values: Tensor  # [N, 0] without a critic
    raw_scores: Tensor  # [B], from the reward model or rule
    moments: ScoreMoments  # of all raw scores so far, including these
    scores: Tensor  # [B], after normalization, scaling, penalties and clipping
    kl: Tensor  # log-ratio of proximal to reference policy (k1), whatever the penalty's estimator
    rewards: Tensor
    kl_sums: Tensor  # [B], over the tokens of a row
    reward_sums: Tensor  # [B]
    raw_advantages: Tensor
    whitening: Whitening  # of the raw advantages; (0, 1) where they are not whitened
    advantages: Tensor
    returns: Tensor  # [N, 0] without a critic
    weights: Tensor


def padded(rows: Rows[list[float] | NDArray[np.float64] | Tensor]) -> Tensor:
    """Ragged rows as float64 [B, T], right-padded with zeros."""
    width = max((len(row) for row in rows), default=0)
    out = torch.zeros(len(rows), width, dtype=torch.float64)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = torch.as_tensor(row, dtype=torch.float64)
    return out


def build_experience(
    batch: list[Sequence], proximal: list[Tensor], scored: list[Scored], ppo: Ppo, kl_coefficient: float, version: int,
    before: ScoreMoments, ranks: Ranks = SINGLE,
) -> Experience:  # fmt: skip
    """Shape rewards and estimate advantages for a complete batch (docs/algorithm.md, step 4). Collective.

    Args:
        batch: rows of all ranks in sequence_id order; `proximal` and `scored` are of this rank's.
        proximal: log-probs of each response under the weights at the start of the step.
        version: the actor's policy version; older tokens are stale.
        before: moments of all raw scores of earlier steps.

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    rows = BatchRows(batch, ranks)
    own = rows.own
    proximal_logp, behaviour_logp = padded(proximal), padded([s.behaviour_logprobs for s in own])
    reference_logp, values = padded([s.reference_logprobs for s in scored]), padded([s.values for s in scored])
    lengths = torch.tensor([s.length for s in own], dtype=torch.int64)
    mask = torch.arange(proximal_logp.shape[1]) < lengths[:, None]
    stale = torch.arange(mask.shape[1]) < torch.tensor([s.stale_tokens(version) for s in own], dtype=torch.int64)[:, None]
    # Reported as k1: unbiased like k3, in which one token of probability 1e-5 under the policy would count thousands of nats.
    kl = kl_estimate(proximal_logp, reference_logp, "k1") * mask
    penalty = kl_estimate(proximal_logp, reference_logp, ppo.kl.estimator) * mask
    raw_B = raw_scores(rows, scored)
    moments = before.updated(raw_B)
    scores_B = shaped_scores(raw_B, batch, ppo, moments)
    rewards = _token_rewards(rows, scores_B, penalty, mask, ppo, kl_coefficient)
    sums = rows.gather(torch.stack([kl.sum(-1), rewards.sum(-1)], dim=1))
    kl_B, rewards_B = sums.unbind(1)
    raw, returns = advantages_and_returns(rows, rewards, rewards_B, values, mask, ppo)
    whitening = rows.whitening(raw[mask]) if ppo.has_critic and ppo.whiten_advantages else UNCHANGED
    return Experience(
        batch=rows, sequences=own, tokens=[s.tokens() for s in own], prompt_lengths=[len(s.prompt) for s in own],
        mask=mask, stale=stale, behaviour_logp=behaviour_logp, proximal_logp=proximal_logp, reference_logp=reference_logp,
        values=values, raw_scores=raw_B, moments=moments, scores=scores_B, kl=kl, rewards=rewards, kl_sums=kl_B,
        reward_sums=rewards_B, raw_advantages=raw, whitening=whitening, advantages=whiten(raw, mask, whitening), returns=returns,
        weights=_importance(proximal_logp, behaviour_logp, mask, stale, ppo),
    )  # fmt: skip


def _importance(proximal_logp: Tensor, behaviour_logp: Tensor, mask: Tensor, stale: Tensor, ppo: Ppo) -> Tensor:
    """Importance weights [N, T] of the tokens that `ppo.tis` corrects, 1 for the others, 0 on padding."""
    corrected = {"off": torch.zeros_like(mask), "stale": stale, "all": mask}[ppo.tis]
    return importance_weights(proximal_logp, behaviour_logp, corrected, (ppo.tis_floor, ppo.tis_cap), ppo.tis_outside) * mask


def _token_rewards(rows: BatchRows, scores_B: Tensor, penalty: Tensor, mask: Tensor, ppo: Ppo, kl_coefficient: float) -> Tensor:
    """Rewards [N, T]: the KL penalty where it is part of the reward, and the score on the last token; whitened if asked for."""
    coefficient = kl_coefficient if ppo.kl.placement == "reward" else 0.0
    rewards = shape_rewards(scores_B[rows.places], penalty, mask, coefficient)
    return scale_to_unit_variance(rewards, mask, rows.whitening(rewards[mask])) if ppo.whiten_rewards else rewards


def advantages_and_returns(
    rows: BatchRows, rewards: Tensor, rewards_B: Tensor, values: Tensor, mask: Tensor, ppo: Ppo
) -> tuple[Tensor, Tensor]:
    """Advantages [N, T] and the critic's targets; without a critic one advantage per answer and no targets.

    Args:
        rewards_B: summed rewards of all rows, for the baselines of groups whose rows other ranks have.
    """
    if ppo.has_critic:
        return gae(rewards, values, mask, ppo.gamma, ppo.gae_lambda)
    return group_advantages(rewards_B, ppo)[rows.places, None] * mask, torch.zeros_like(values)
