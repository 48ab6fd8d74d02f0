"""Group-relative advantages without a critic (GRPO, Dr. GRPO, RLOO). Rows of a group are adjacent.

GRPO (arXiv 2402.03300, §4.1.2): (r − mean) ÷ std of the group. The paper does not specify which std, nor the case std = 0;
this is the unbiased std plus 1e-6, as in verl (TRL: 1e-4). Without the division it is Dr. GRPO (arXiv 2503.20783).
RLOO (arXiv 2402.14740): r minus the mean of the others, which equals G ÷ (G−1) times r minus the mean of all.
"""

from __future__ import annotations

from torch import Tensor

from oppo_contract.spec import Ppo

STD_EPS = 1e-6


def group_advantages(rewards_B: Tensor, ppo: Ppo) -> Tensor:
    """One advantage per answer [B·G] from one reward per answer, KL penalty included."""
    grouped = rewards_B.view(-1, ppo.group_size)
    return (rloo(grouped) if ppo.algorithm == "rloo" else grpo(grouped, ppo.normalize_advantages_by_std)).flatten()


def grpo(rewards_NG: Tensor, by_std: bool) -> Tensor:
    """r − mean of its group, ÷ (std + 1e-6) with `by_std`. 0 for a group of equal rewards."""
    centred = rewards_NG - rewards_NG.mean(-1, keepdim=True)
    return centred / (rewards_NG.std(-1, keepdim=True) + STD_EPS) if by_std else centred


def rloo(rewards_NG: Tensor) -> Tensor:
    """r − mean of the others of its group."""
    others = rewards_NG.shape[-1] - 1
    return rewards_NG - (rewards_NG.sum(-1, keepdim=True) - rewards_NG) / others
