"""Scorers that also train: answers that are certain to be in the batch, while the others are decoded (update overlap)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from oppo_core.models.host_device import on_host
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import CriticUpdate, critic_order
from oppo_core.ppo.early_gradients import EarlyGradients
from oppo_core.ppo.experience import build_experience
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.scoring.single_pass import WholeScorers


@dataclass(frozen=True, slots=True)
class EarlyOrder:
    """Train on these finished answers of PPO step `step`, from 0, whose tokens have all been handed over."""

    sequences: list[Sequence]
    step: int
    kl_coefficient: float


class EarlyTraining(Protocol):
    """What update overlap asks of the scorers besides `Scoring`."""

    def train_early(self, order: EarlyOrder) -> None:
        """Train both roles on answers that are certain to be in the batch, without an optimizer step; returns at once."""


class EarlyScorers(WholeScorers):
    """`WholeScorers` that add to the gradients of both roles before the batch is complete.

    `actor` computes with the weights of the actor's process, in shared memory; its sums go to `gradients`, which are shared too.
    """

    actor: ActorTrainer
    gradients: EarlyGradients
    _early: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]]  # values and proximal log-probs of what was trained

    def share(self, actor: ActorTrainer, gradients: EarlyGradients) -> ScorerSet:
        """Train that actor early."""
        self.actor, self.gradients, self._early = actor, gradients, {}
        return self

    def train_early(self, order: EarlyOrder) -> None:
        """See `EarlyTraining.train_early`."""
        assert self.trainer is not None
        ids, rests = [s.sequence_id for s in order.sequences], self.actor.rests(order.step)
        tracks = [self.tracks[i] for i in ids]
        tokens, prompts = [track.tokens for track in tracks], [track.prompt_length for track in tracks]
        self._await_rewards(ids)
        with self.trace.span("actor", "actor-forward", rows=len(ids)):
            forward = self.actor.hold(tokens, prompts, 0 if rests else None, [track.support for track in tracks])
            proximal = forward.first
        with self.trace.span("critic", "update-critic", rows=len(ids)):
            held = self.trainer.hold(tokens, prompts)
            scored = list(self._scored(ids, on_host([[values] for values in held.first])).values())
            experience = build_experience(
                order.sequences, proximal, scored, self.actor.ppo, order.kl_coefficient, order.step, ScoreMoments()
            )  # fmt: skip
            self.trainer.train_early(critic_order(experience, order.step), held)
        if not rests:
            with self.trace.span("actor", "update-actor", rows=len(ids)):
                self.gradients.add(self.actor, experience, forward, order.kl_coefficient)
        self._early |= {i: (row.values, logp.double().numpy()) for i, row, logp in zip(ids, scored, proximal, strict=True)}

    def start_collect(self, sequence_ids: list[int]) -> None:
        """See `Scoring.start_collect`."""
        super().start_collect(sequence_ids)
        self._scores |= {i: replace(self._scores[i], proximal_logprobs=logprobs) for i, (_, logprobs) in self._early.items()}

    def _values(self, sequence_ids: list[int]) -> list[NDArray[np.float64]]:
        late = [i for i in sequence_ids if i not in self._early]
        known = {i: values for i, (values, _) in self._early.items()} | dict(zip(late, super()._values(late), strict=True))
        return [known[i] for i in sequence_ids]

    def start_critic_update(self, update: CriticUpdate) -> None:
        """See `Scoring.start_critic_update`: trains the rest, and takes the optimizer step with the gradients of all."""
        super().start_critic_update(update.without(self._early))
        self.release(list(self._early))
        self._early = {}
