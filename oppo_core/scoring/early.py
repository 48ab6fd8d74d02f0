"""Update overlap: while the rest is decoded, the scorers train responses that are certain to be in the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.host_device import on_host
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import CriticUpdate, build_critic_update
from oppo_core.ppo.early_gradients import EarlyGradients
from oppo_core.ppo.experience import build_experience
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.scoring.single_pass import SinglePassScorers


@dataclass(frozen=True, slots=True)
class SharedActor:
    """The actor's weights by name and its gradient sums in shared memory, for update overlap."""

    weights: dict[str, Tensor]
    gradients: EarlyGradients


@dataclass(frozen=True, slots=True)
class EarlyBatch:
    """Finished answers of PPO step `step` (from 0) to train on; all their tokens were sent before."""

    sequences: list[Sequence]
    step: int
    kl_coefficient: float


class EarlyTrainerProtocol(Protocol):
    """Scorer method for update overlap, in addition to `ScorerProtocol`."""

    def train_early(self, batch: EarlyBatch) -> None:
        """Add gradients of both roles for answers certain to be in the batch, without an optimizer step. Returns at once."""


class EarlyScorers(SinglePassScorers):
    """`SinglePassScorers` that accumulate gradients of both roles before the batch is complete.

    `actor` uses the actor process's weights in shared memory; its gradients are summed in `gradients`, also shared.
    """

    actor: ActorTrainer
    gradients: EarlyGradients
    _early: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]  # values and proximal log-probs of early answers

    def share(self, actor: ActorTrainer, gradients: EarlyGradients) -> ScorerSet:
        """Attach the shared actor and its gradient sums; returns self."""
        self.actor, self.gradients, self._early = actor, gradients, {}
        return self

    def train_early(self, batch: EarlyBatch) -> None:
        assert self.trainer is not None
        ids, is_warmup = [s.sequence_id for s in batch.sequences], self.actor.is_critic_warmup(batch.step)
        sequences = [self.sequences[i] for i in ids]
        tokens, prompts = [sequence.tokens for sequence in sequences], [sequence.prompt_length for sequence in sequences]
        rewards = self._rewards(ids)
        with self.trace.span("actor", "actor-forward", rows=len(ids)):
            forward = self.actor.forward(tokens, prompts, 0 if is_warmup else None, [sequence.support for sequence in sequences])
            proximal = forward.first
        with self.trace.span("critic", "update-critic", rows=len(ids)):
            retained = self.trainer.forward(tokens, prompts)
            scored = list(self._scored(ids, on_host([[values] for values in retained.first]), rewards).values())
            experience = build_experience(
                batch.sequences, proximal, scored, self.actor.ppo, batch.kl_coefficient, batch.step, ScoreMoments()
            )  # fmt: skip
            self.trainer.train_early(build_critic_update(experience, batch.step), retained)
        if not is_warmup:
            with self.trace.span("actor", "update-actor", rows=len(ids)):
                self.gradients.add(self.actor, experience, forward, batch.kl_coefficient)
        self._early |= {i: (row.values, logp.double().numpy()) for i, row, logp in zip(ids, scored, proximal, strict=True)}

    def start_collect(self, sequence_ids: list[int]) -> None:
        super().start_collect(sequence_ids)
        self._scores |= {i: replace(self._scores[i], proximal_logprobs=logprobs) for i, (_, logprobs) in self._early.items()}

    def _values(self, sequence_ids: list[int]) -> list[NDArray[np.float64]]:
        late = [i for i in sequence_ids if i not in self._early]
        known = {i: values for i, (values, _) in self._early.items()} | dict(zip(late, super()._values(late), strict=True))
        return [known[i] for i in sequence_ids]

    def start_critic_update(self, update: CriticUpdate) -> None:
        """Train on the remaining answers and take the optimizer step with the gradients of all."""
        super().start_critic_update(update.without(self._early))
        self.release(list(self._early))
        self._early = {}
