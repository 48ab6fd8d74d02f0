"""The second half of a step: scores, advantages, and both updates; after decoding, or begun while the tail still decodes.

`PlainUpdate` is PPO as everybody knows it, `CriticFreeUpdate` is GRPO and RLOO. `OverlappedUpdate` computes the same as
`PlainUpdate`, with the scorers' process as a partner: what is certain to be in the batch is trained while others still decode,
and the rest is shared between the two processes (docs/algorithm.md, "Update overlap"). Who does what follows from counted tokens,
never from measured time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.ppo.actor import ActorTrainer, TokenSums
from oppo_core.ppo.critic import CriticUpdate
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import whitening
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.reporting.metrics import part_metrics
from oppo_core.rollout.sequence import Sequence, Support
from oppo_core.scoring.overlapped_trainer import EarlyOrder, LateUpdate, Partnership, ShareOrder
from oppo_core.scoring.results import Scored
from oppo_core.update.gather_batch import WholeBatch, whole_batch
from oppo_core.update.work_split import Costs, Ledger

if TYPE_CHECKING:
    from oppo_core.engine.build import Engine


class Updating(Protocol):
    """What the training loop asks."""

    def begin(self, engine: Engine) -> None:
        """The pool is topped up, decoding is about to begin."""

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """A chunk was handed over and the batch is not complete; `finishers` are those of this step so far."""

    def suspend(self) -> dict[str, Any]:
        """What was done in the step so far, as plain data."""

    def resume(self, engine: Engine, state: dict[str, Any]) -> None:
        """Go on, in place of `begin`, where `suspend` left off; `engine` has everything else back."""

    def learn(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """Train on the complete batch; returns it with everything the loss needed, and `actor/*` and `critic/*` metrics."""


class PlainUpdate:
    """Everything after decoding: proximal log-probs beside the last scores, the actor's update beside the critic's."""

    def begin(self, engine: Engine) -> None:
        """Nothing to prepare."""

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """Nothing is trained early."""

    def suspend(self) -> dict[str, Any]:
        """Nothing was done."""
        return {}

    def resume(self, engine: Engine, state: dict[str, Any]) -> None:
        """Nothing was done."""

    def learn(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """See `Updating.learn`."""
        trace, in_turn = engine.trace, engine.updates_in_turn
        experience, parts = experience_of(engine, trained, version)
        with trace.span("actor", "advantages", rows=len(trained)):
            order = critic_order(experience, version)
        engine.scorers.start_critic_update(order)
        critic_metrics = waited_for_critic(engine) if in_turn else {}
        with trace.span("actor", "update-actor", rows=len(trained)):
            actor_metrics = engine.actor.update(experience, version, engine.progress.kl_coefficient)
        critic_metrics = critic_metrics or waited_for_critic(engine)
        return experience, actor_metrics | critic_metrics | parts


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
        with engine.trace.span("actor", "update-actor", rows=len(trained)):
            metrics = engine.actor.update(experience, version, engine.progress.kl_coefficient)
        return experience, metrics | parts


def experience_of(engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
    """Proximal log-probs of the complete batch beside its last scores, then rewards and advantages; with the scores' parts."""
    scorers, trace = engine.scorers, engine.trace
    ids = [s.sequence_id for s in trained]
    scorers.start_collect(ids)
    with trace.span("actor", "actor-forward", rows=len(ids)):
        proximal = engine.actor.logprobs(*rows_of(trained))
    with trace.wait("score"):
        scored = scorers.wait_collect()
    batch = whole_batch(engine, trained, proximal, [scored[i] for i in ids])
    with trace.span("actor", "advantages", rows=len(ids)):
        return judged(engine, batch, version), part_metrics(batch.scored)


def judged(engine: Engine, batch: WholeBatch, version: int) -> Experience:
    """The batch of all ranks with everything that the loss needs."""
    spec, coefficient = engine.spec, engine.progress.kl_coefficient
    found = engine.experience(batch.sequences, batch.proximal, batch.scored, spec.ppo, coefficient, version, engine.moments)
    return found if batch.own is None else replace(found, own_rows=batch.own)


def critic_order(experience: Experience, step: int) -> CriticUpdate:
    """The critic's share of a step, this rank's rows without padding."""
    e, lengths = experience, experience.mask.sum(-1).tolist()
    ids = [e.sequences[row].sequence_id for row in e.own]
    returns = [e.returns[row, : lengths[row]].numpy() for row in e.own]
    values = [e.values[row, : lengths[row]].numpy() for row in e.own]
    return CriticUpdate(step, ids, [e.prompt_lengths[row] for row in e.own], returns, values)


@dataclass(slots=True)
class OverlappedUpdate:
    """`gradients`: the partner's part of the actor's gradient, in shared memory, one tensor a parameter."""

    gradients: list[Tensor]
    costs: Costs
    ledger: Ledger = field(default_factory=Ledger)
    orders: list[tuple[list[int], bool]] = field(default_factory=list)  # this step's: sequence_ids, and whether the actor too

    def begin(self, engine: Engine) -> None:
        """Rate surplus answers of earlier steps under the present weights; the decoder has rated those that go on."""
        self.ledger, self.orders = Ledger(), []
        surplus = [s for s in engine.pool.sequences if s.finished]
        with engine.trace.span("actor", "actor-forward", rows=len(surplus)):
            tokens, prompts, supports = rows_of(surplus)
            rated = actor_of(engine).hold(tokens, prompts, 0, supports).first
        for sequence, logprobs in zip(surplus, rated, strict=True):
            sequence.stale_logprobs = logprobs.tolist()

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """Order the training of answers that are certain to be in the batch, once they are enough for an efficient pass."""
        self.ledger.decoded(engine.decoder.rounds, engine.decoder.decoded, self.costs)
        # What was sampled after a kept cache has no log-probs under these weights yet: it is trained with the rest.
        certain = [s for s in engine.pool.certain(finishers) if not s.reads_stale(version)]
        ready = [s for s in certain if s.sequence_id not in self.ledger.critic]
        if not self.ledger.worth_a_pass(ready):
            return
        both = [] if actor_of(engine).rests(version) else self.ledger.affordable(ready, self.costs)
        chosen = {s.sequence_id for s in both}
        for part, with_actor in ((both, True), ([s for s in ready if s.sequence_id not in chosen], False)):
            if part:
                partner_of(engine).train_early(EarlyOrder(part, version, engine.progress.kl_coefficient, with_actor))
                self.ledger.ordered(part, with_actor, self.costs)
                self.orders.append(([s.sequence_id for s in part], with_actor))

    def suspend(self) -> dict[str, Any]:
        """Who was trained early, in which passes. Their gradients are not saved: the same passes give the same bits again."""
        ledger = asdict(self.ledger) | {"critic": sorted(self.ledger.critic), "actor": sorted(self.ledger.actor)}
        return {"ledger": ledger, "orders": self.orders}

    def resume(self, engine: Engine, state: dict[str, Any]) -> None:
        """Order the same passes again."""
        known = state["ledger"]
        self.ledger = Ledger(**known | {"critic": set(known["critic"]), "actor": set(known["actor"])})
        self.orders = [(ids, with_actor) for ids, with_actor in state["orders"]]
        sequences = {s.sequence_id: s for s in engine.pool.sequences}
        for ids, with_actor in self.orders:
            step, coefficient = engine.progress.step, engine.progress.kl_coefficient
            # The warm-up may have been made longer meanwhile: then the actor rests in this step after all.
            with_actor = with_actor and not actor_of(engine).rests(step)
            order = EarlyOrder([sequences[i] for i in ids], step, coefficient, with_actor)
            partner_of(engine).train_early(order)

    def learn(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """See `Updating.learn`."""
        trace, coefficient, actor, partner = engine.trace, engine.progress.kl_coefficient, actor_of(engine), partner_of(engine)
        ids = [s.sequence_id for s in trained]
        self.ledger.decoded(engine.decoder.rounds, engine.decoder.decoded, self.costs)
        mine, theirs = (list(range(len(ids))), []) if actor.rests(version) else self.ledger.shares(trained, self.costs)
        partner.start_share(ShareOrder(ids, [trained[row].sequence_id for row in theirs]))
        with trace.span("actor", "actor-forward", rows=len(mine)):
            forward = actor.logprobs(*rows_of([trained[row] for row in mine]))
        with trace.wait("score"):
            scored = partner.wait_share()
        proximal = proximal_of(trained, scored, dict(zip(mine, forward, strict=True)))
        batch = whole_batch(engine, trained, proximal, [scored[i] for i in ids])
        with trace.span("actor", "advantages", rows=len(ids)):
            experience = judged(engine, batch, version)
            mine, theirs = ([experience.own[place] for place in places] for places in (mine, theirs))
            late = self._late_update(experience, theirs, version, coefficient)
        partner.start_late_update(late)
        metrics = (self._rest if actor.rests(version) else self._train)(engine, experience, mine, late)
        return experience, metrics | part_metrics(batch.scored)

    def _train(self, engine: Engine, experience: Experience, mine: list[int], late: LateUpdate) -> dict[str, float]:
        """The actor's update on `mine`, joined with the partner's."""
        actor, sums = actor_of(engine), TokenSums(tokens=late.tokens)
        with engine.trace.span("actor", "update-actor", rows=len(mine)), engine.ranks.agreed(NonFiniteError):
            actor.accumulate(experience, mine, late.kl_coefficient, late.tokens, sums, late.step)
            actor.mix_in(late.step, 0, sums)
        with engine.trace.wait("update"):
            critic_metrics = partner_of(engine).wait_late_update()
        with engine.trace.span("actor", "update-actor"):
            others = sorted(set(experience.own) - set(mine))
            sums.loss -= float((experience.weights * experience.advantages)[others].sum())
            sums.entropy += critic_metrics.pop("entropy")
            return actor.apply_with(self.gradients, sums, late.step) | critic_metrics

    def _rest(self, engine: Engine, experience: Experience, mine: list[int], late: LateUpdate) -> dict[str, float]:
        """Only the critic is trained."""
        with engine.trace.wait("update"):
            critic_metrics = partner_of(engine).wait_late_update()
        critic_metrics.pop("entropy")
        for gradient in self.gradients:
            gradient.zero_()
        return actor_of(engine).rest(late.step) | critic_metrics

    def _late_update(self, e: Experience, theirs: list[int], step: int, coefficient: float) -> LateUpdate:
        lengths, ids = e.mask.sum(-1).tolist(), [s.sequence_id for s in e.sequences]
        mean, scale = whitening(e.raw_advantages, e.mask) if self.costs.whitens else (0.0, 1.0)
        weighted = e.weights * e.advantages
        late = [row for row in e.own if ids[row] not in self.ledger.critic]
        returns = {ids[row]: e.returns[row, : lengths[row]].numpy() for row in late}
        advantages = {ids[row]: weighted[row, : lengths[row]].numpy() for row in theirs}
        return LateUpdate(step, coefficient, sum(lengths), mean, scale, returns, advantages)


def proximal_of(trained: list[Sequence], scored: dict[int, Scored], mine: dict[int, Tensor]) -> list[Tensor]:
    """Proximal log-probs a row, from whoever ran the forward pass."""
    rows = []
    for row, sequence in enumerate(trained):
        theirs = scored[sequence.sequence_id].proximal_logprobs
        rows.append(mine[row] if theirs is None else torch.from_numpy(theirs))
    return rows


def actor_of(engine: Engine) -> ActorTrainer:
    """The real trainer: only that one can share its update."""
    return cast(ActorTrainer, engine.actor)


def partner_of(engine: Engine) -> Partnership:
    """The scorers as the partner that `assemble` has made them."""
    return cast(Partnership, engine.scorers)
