"""The second half of a step: scores, advantages, and both updates, after decoding.

`PlainUpdate` is PPO as everybody knows it, `CriticFreeUpdate` is GRPO and RLOO. `oppo_core/update/overlapped.py` begins while the
tail is still decoded; `oppo_core/update/nonfinite.py` has the update that may leave out a step.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray

from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import critic_order
from oppo_core.ppo.experience import Experience
from oppo_core.reporting.metrics import part_metrics
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.update.gather_batch import WholeBatch, whole_batch

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine


class PlainUpdate:
    """Everything after decoding: proximal log-probs beside the last scores, the actor's update beside the critic's."""

    def begin(self, engine: Engine) -> None:
        """Nothing to prepare."""

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """Nothing is trained early."""

    def learn(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """See `Updating.learn`."""
        experience, parts = experience_of(engine, trained, version, self.early)
        with engine.trace.span("actor", "advantages", rows=len(trained)):
            order = critic_order(experience, version)
        engine.scorers.start_critic_update(order)
        critic_metrics = waited_for_critic(engine) if engine.updates_in_turn else {}
        actor_metrics = self.train_actor(engine, experience, version)
        critic_metrics = critic_metrics or waited_for_critic(engine)
        return experience, actor_metrics | critic_metrics | parts

    @property
    def early(self) -> Set[int]:
        """Sequences of the batch that were trained before it was complete: none."""
        return frozenset()

    def train_actor(self, engine: Engine, experience: Experience, version: int) -> dict[str, float]:
        """The actor's update; returns `actor/*` metrics."""
        with engine.trace.span("actor", "update-actor", rows=len(experience.own)):
            return engine.actor.update(experience, version, engine.progress.kl_coefficient)


def waited_for_critic(engine: Engine) -> dict[str, float]:
    """The `critic/*` metrics of the update that was begun."""
    with engine.trace.wait("update"):
        return engine.scorers.wait_critic_update()


def rows_of(sequences: list[Sequence]) -> tuple[list[NDArray[np.int64]], list[int], list[Support]]:
    """What the actor's forward pass needs: tokens, prompt lengths, and what each response token was sampled among."""
    return [s.tokens() for s in sequences], [len(s.prompt) for s in sequences], [s.support for s in sequences]


class CriticFreeUpdate(PlainUpdate):
    """GRPO and RLOO: after the scores there is only the actor to train."""

    def learn(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """See `Updating.learn`."""
        experience, parts = experience_of(engine, trained, version)
        engine.scorers.release([s.sequence_id for s in trained])
        return experience, self.train_actor(engine, experience, version) | parts


def experience_of(
    engine: Engine, trained: list[Sequence], version: int, early: Set[int] = frozenset()
) -> tuple[Experience, dict[str, float]]:
    """Proximal log-probs of the complete batch beside its last scores, then rewards and advantages; with the scores' parts.

    `early`: sequences whose proximal log-probs the scorers have computed.
    """
    scorers, trace = engine.scorers, engine.trace
    ids, late = [s.sequence_id for s in trained], [s for s in trained if s.sequence_id not in early]
    scorers.start_collect(ids)
    with trace.span("actor", "actor-forward", rows=len(late)):
        computed = iter(engine.actor.logprobs(*rows_of(late)))
    with trace.wait("score"):
        scored = scorers.wait_collect()
    known = [scored[i].proximal_logprobs for i in ids]
    proximal = [next(computed) if logprobs is None else torch.from_numpy(logprobs) for logprobs in known]
    batch = whole_batch(engine, trained, proximal, [scored[i] for i in ids])
    with trace.span("actor", "advantages", rows=len(ids)):
        return judged(engine, batch, version), part_metrics(batch.scored)


def judged(engine: Engine, batch: WholeBatch, version: int) -> Experience:
    """The batch of all ranks with everything that the loss needs."""
    spec, coefficient = engine.spec, engine.progress.kl_coefficient
    found = engine.experience(batch.sequences, batch.proximal, batch.scored, spec.ppo, coefficient, version, engine.moments)
    return found if batch.own is None else replace(found, own_rows=batch.own)


def actor_of(engine: Engine) -> ActorTrainer:
    """The real trainer: the simulated one has no gradients."""
    return cast(ActorTrainer, engine.actor)
