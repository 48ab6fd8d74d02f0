"""Advantages without a critic: an answer is judged by the other answers to the same prompt. Rows of a group follow each other.

GRPO (arXiv 2402.03300, §4.1.2): (r − mean) ÷ std of the group. The paper leaves open which std, and what happens where it is 0;
this is the unbiased one with 1e-6 added to it, as in verl (TRL: 1e-4). Without the division it is Dr. GRPO (arXiv 2503.20783).
RLOO (arXiv 2402.14740): r less the mean of the others, which is G ÷ (G−1) times r less the mean of all.
"""

from __future__ import annotations

from torch import Tensor

from oppo_contract.spec import Ppo

STD_EPS = 1e-6


def group_advantages(rewards_B: Tensor, ppo: Ppo) -> Tensor:
    """One advantage an answer [B·G] from one reward an answer, KL penalty included."""
    grouped = rewards_B.view(-1, ppo.group_size)
    return (rloo(grouped) if ppo.algorithm == "rloo" else grpo(grouped, ppo.normalize_advantages_by_std)).flatten()


def grpo(rewards_NG: Tensor, by_std: bool) -> Tensor:
    """r − mean of its group, and ÷ (std + 1e-6) with `by_std`. A group of equal rewards teaches nothing: 0."""
    centred = rewards_NG - rewards_NG.mean(-1, keepdim=True)
    return centred / (rewards_NG.std(-1, keepdim=True) + STD_EPS) if by_std else centred


def rloo(rewards_NG: Tensor) -> Tensor:
    """r − mean of the others of its group."""
    others = rewards_NG.shape[-1] - 1
    return rewards_NG - (rewards_NG.sum(-1, keepdim=True) - rewards_NG) / others
