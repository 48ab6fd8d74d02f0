"""A batch with the fields that the report and the controllers read; per-token values are zero."""

from __future__ import annotations

import torch
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.ppo.batch_rows import BatchRows
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import UNCHANGED
from oppo_core.ppo.reward_shaping import ScoreMoments, raw_scores, shaped_scores
from oppo_core.ppo.scored import Scored
from oppo_core.rollout.sequence import Sequence
from oppo_core.simulation.machine import Machine


class SimulatedExperience:
    """Replaces `build_experience`: real masks, staleness and scores; all else is zero."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def __call__(
        self,
        batch: list[Sequence],
        proximal: list[Tensor],
        scored: list[Scored],
        ppo: Ppo,
        kl_coefficient: float,
        version: int,
        before: ScoreMoments,
        ranks: Ranks = SINGLE,
    ) -> Experience:
        """Costs the time of computing advantages."""
        lengths = torch.tensor([s.length for s in batch])
        self._machine.work(int(lengths.sum()) * self._machine.devices.overheads.advantage_us)
        position = torch.arange(int(lengths.max()))
        stale = torch.tensor([s.stale_tokens(version) for s in batch])
        rows = BatchRows(batch)
        mask, raw = position < lengths[:, None], raw_scores(rows, scored)
        moments = before.updated(raw)
        scores = shaped_scores(raw, batch, ppo, moments)
        zeros = torch.zeros((), dtype=torch.float64).expand(mask.shape)
        rewards = torch.zeros(mask.shape, dtype=torch.float64)
        rewards[:, 0] = scores
        return Experience(
            batch=rows, sequences=batch, tokens=[s.tokens() for s in batch], prompt_lengths=[len(s.prompt) for s in batch],
            mask=mask, stale=position < stale[:, None], behaviour_logp=zeros, proximal_logp=zeros, reference_logp=zeros,
            values=zeros, raw_scores=raw, moments=moments, scores=scores, kl=zeros, rewards=rewards,
            kl_sums=zeros.sum(-1), reward_sums=scores, raw_advantages=zeros, whitening=UNCHANGED, advantages=zeros, returns=zeros,
            weights=zeros + mask,
        )  # fmt: skip
