"""The second half of a PPO step, after decoding: scores, advantages, and the updates of actor and critic.

`PlainUpdate` is standard PPO, `CriticFreeUpdate` is GRPO and RLOO. `oppo_core/update/overlapped.py` starts training while the
tail is still decoded; `oppo_core/update/nonfinite.py` can skip a non-finite step.
"""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import build_critic_update
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.scored import Scored
from oppo_core.reporting.metrics import part_metrics
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.trace.gpu_stats import GB

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine


class PlainUpdate:
    """PPO: proximal log-probs concurrently with the last scores, the actor's update concurrently with the critic's."""

    def begin(self, engine: Engine) -> None:
        """No-op."""

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """No-op: nothing is trained early."""

    def train_batch(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        experience, parts = compute_experience(engine, trained, version, self.early)
        with engine.trace.span("actor", "advantages", rows=len(experience.sequences)):
            update = build_critic_update(experience, version)
        engine.scorers.start_critic_update(update)
        critic_metrics = wait_for_critic(engine) if engine.serialize_updates else {}
        actor_metrics = self.train_actor(engine, experience, version)
        critic_metrics = critic_metrics or wait_for_critic(engine)
        return experience, actor_metrics | critic_metrics | parts

    @property
    def early(self) -> Set[int]:
        """sequence_ids trained before the batch was complete: none."""
        return frozenset()

    def train_actor(self, engine: Engine, experience: Experience, version: int) -> dict[str, float]:
        """Update the actor; returns `actor/*` metrics."""
        with engine.trace.span("actor", "update-actor", rows=len(experience.sequences)):
            metrics = engine.actor.update(experience, version, engine.progress.kl_coefficient)
        if engine.spec.training.shards_weights:
            with engine.trace.span("actor", "weights"):
                metrics["perf/hand_over_gb"] = engine.actor.hand_over() / GB
        return metrics


def wait_for_critic(engine: Engine) -> dict[str, float]:
    """Wait for the critic's update; returns `critic/*` metrics."""
    with engine.trace.wait("update"):
        return engine.scorers.wait_critic_update()


def forward_inputs(sequences: list[Sequence]) -> tuple[list[NDArray[np.int64]], list[int], list[Support]]:
    """Inputs of the actor's forward pass: tokens, prompt lengths and supports."""
    return [s.tokens() for s in sequences], [len(s.prompt) for s in sequences], [s.support for s in sequences]


class CriticFreeUpdate(PlainUpdate):
    """GRPO and RLOO: only the actor is trained."""

    def train_batch(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        experience, parts = compute_experience(engine, trained, version)
        engine.scorers.release([s.sequence_id for s in engine.local(trained)])
        return experience, self.train_actor(engine, experience, version) | parts


def compute_experience(
    engine: Engine, trained: list[Sequence], version: int, early: Set[int] = frozenset()
) -> tuple[Experience, dict[str, float]]:
    """Experience of the complete batch and metrics of the reward's parts.

    Proximal log-probs overlap with the last scores and the critic's forward pass.

    `early`: sequence_ids whose proximal log-probs the scorers have computed.
    """
    scorers, trace, own = engine.scorers, engine.trace, engine.local(trained)
    ids, late = [s.sequence_id for s in own], [s for s in own if s.sequence_id not in early]
    scorers.start_collect(ids)
    scorers.forward_critic(ids)
    with trace.span("actor", "actor-forward", rows=len(late)):
        computed = iter(engine.actor.logprobs(*forward_inputs(late)))
    with trace.wait("score"):
        scored = scorers.wait_collect()
    known = [scored[i].proximal_logprobs for i in ids]
    proximal = [next(computed) if logprobs is None else torch.from_numpy(logprobs) for logprobs in known]
    engine.on_any_rank(False)  # statistics over all rows wait for the slowest rank
    with trace.span("actor", "advantages", rows=len(ids)):
        return build_step_experience(engine, trained, proximal, [scored[i] for i in ids], version)


def build_step_experience(
    engine: Engine, trained: list[Sequence], proximal: list[Tensor], scored: list[Scored], version: int
) -> tuple[Experience, dict[str, float]]:
    """Experience of the rows `trained` of all ranks, and metrics of the reward's parts."""
    spec, coefficient = engine.spec, engine.progress.kl_coefficient
    experience = engine.experience(trained, proximal, scored, spec.ppo, coefficient, version, engine.moments, engine.ranks)
    return experience, part_metrics(experience.batch, scored, len(spec.models.reward.sources()))


def actor_trainer(engine: Engine) -> ActorTrainer:
    """The actor as `ActorTrainer`; strategies that use gradients never run with the simulated actor."""
    return cast(ActorTrainer, engine.actor)
