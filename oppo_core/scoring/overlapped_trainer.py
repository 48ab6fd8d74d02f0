"""The scorers' process as the actor's partner in training: update overlap (docs/algorithm.md, "Update overlap").

Answers that are certain to be in the batch are trained while the tail still decodes. Weights do not change before the
optimizers step, so every ratio is 1, and the policy gradient is linear in the advantages: Σ∇(w·A·log p) and Σ∇(w·log p) are
summed apart and combined once the whitening statistics of the whole batch are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.models.host_device import on_host
from oppo_core.ppo.actor import ActorTrainer
from oppo_core.ppo.critic import CriticTrainer
from oppo_core.ppo.deferred_metrics import Figures
from oppo_core.ppo.experience import build_experience
from oppo_core.ppo.losses import kl_estimate
from oppo_core.ppo.retained_forward import HeldForward
from oppo_core.ppo.reward_shaping import ScoreMoments
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.results import Scored
from oppo_core.scoring.scored_sequence import Track
from oppo_core.scoring.scorers import ScorerSet


@dataclass(frozen=True, slots=True)
class EarlyOrder:
    """Train the critic on these finished answers of the step's batch now, and with `actor` the actor as well."""

    sequences: list[Sequence]
    version: int
    kl_coefficient: float
    actor: bool


@dataclass(frozen=True, slots=True)
class ShareOrder:
    """The batch is complete: score all of `sequence_ids`; the partner trains the actor on those in `theirs`."""

    sequence_ids: list[int]
    theirs: list[int]


@dataclass(frozen=True, slots=True)
class LateUpdate:
    """What the rest of the update needs.

    `returns` by sequence_id for answers whose critic update is due; `advantages`: w·A a token by sequence_id for the
    partner's share of the actor's update. Early sums are combined as (Σ∇(w·A) − `mean`·Σ∇w) · `scale`; everything is divided by
    the batch's `tokens`.
    """

    step: int
    kl_coefficient: float
    tokens: int
    mean: float
    scale: float
    returns: dict[int, NDArray[np.float64]]
    advantages: dict[int, NDArray[np.float64]]


class Partnership(Protocol):
    """What update overlap asks of the scorers' process, besides `Scoring`."""

    def train_early(self, order: EarlyOrder) -> None:
        """Train on finished answers that are certain to be in the batch; returns at once."""

    def start_share(self, order: ShareOrder) -> None:
        """Ask for everything that is known or due of the complete batch."""

    def wait_share(self) -> dict[int, Scored]:
        """Scores by sequence_id; `proximal_logprobs` where the partner ran the actor's forward pass."""

    def start_late_update(self, update: LateUpdate) -> None:
        """Finish the critic's update, and the partner's part of the actor's."""

    def wait_late_update(self) -> dict[str, float]:
        """The critic's metrics, and `entropy`: its sum over the answers that the partner trained the actor on."""


@dataclass(slots=True)
class Gathered:
    """Gradient sums of answers that were trained early, in the order of the network's parameters."""

    advantage: list[Tensor]
    plain: list[Tensor]


@dataclass(slots=True)
class StepState:
    """What the partner did in the present step."""

    early_values: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    early_proximal: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    gathered: Gathered | None = None
    critic_loss: float = 0.0
    critic_clipped: float = 0.0
    entropy: float = 0.0
    late: list[int] = field(default_factory=list)
    late_critic: HeldForward | None = None
    theirs: list[int] = field(default_factory=list)
    late_actor: HeldForward | None = None


class PartnerScorers(ScorerSet):
    """Reward and reference are streamed as ever; the critic is read and trained in one pass over whole answers.

    `actor` computes with the weights of the actor's process (shared memory); `gradients` are shared too, one a parameter.
    """

    actor: ActorTrainer
    trainer: CriticTrainer
    gradients: list[Tensor]
    ppo: Ppo
    step: StepState

    def join(self, actor: ActorTrainer, gradients: list[Tensor]) -> PartnerScorers:
        """Become the partner of the process that owns `actor`'s weights."""
        self.actor, self.gradients, self.ppo, self.step = actor, gradients, actor.ppo, StepState()
        return self

    def _read_critic(
        self, tracks: dict[int, Track], tokens: dict[int, NDArray[np.int64]], finished: set[int], chunk: int
    ) -> None:
        """Nothing: the critic reads whole answers when it is trained on them."""

    def train_early(self, order: EarlyOrder) -> None:
        """Train on finished answers whose tokens have all been handed over."""
        ids = [s.sequence_id for s in order.sequences]
        self._await_rewards(ids)
        with self.trace.span("critic", "update-critic", rows=len(ids)):
            held = self._critic_forward(ids)
            scored = list(self._scored(ids, on_host([[row] for row in held.first])).values())
            proximal = [torch.tensor(s.proximal(), dtype=torch.float64) for s in order.sequences]
            experience = build_experience(
                order.sequences, proximal, scored, self.ppo, order.kl_coefficient, order.version, ScoreMoments()
            )  # fmt: skip
            lengths = [s.length for s in order.sequences]
            returns = {i: experience.returns[n, : lengths[n]].numpy() for n, i in enumerate(ids)}
            self._critic_backward(held, ids, returns, order.version)
            self.step.early_values |= {i: row.values for i, row in zip(ids, scored, strict=True)}
        if order.actor:
            with self.trace.span("actor", "update-actor", rows=len(ids)):
                weighted = experience.weights * experience.raw_advantages
                self._gather(
                    ids, [weighted[n, :size] for n, size in enumerate(lengths)],
                    [experience.weights[n, :size] for n, size in enumerate(lengths)], order.kl_coefficient,
                )  # fmt: skip

    def start_share(self, order: ShareOrder) -> None:
        """Values for the answers that were not trained early, and the actor's forward pass over the partner's share."""
        step = self.step
        step.late = [i for i in order.sequence_ids if i not in step.early_values]
        step.theirs = order.theirs
        with self.trace.span("critic", "critic-prefill", rows=len(step.late)):
            step.late_critic = self._critic_forward(step.late)
        values = step.early_values | {i: row.double().numpy() for i, row in zip(step.late, step.late_critic.first, strict=True)}
        with self.trace.span("actor", "actor-forward", rows=len(step.theirs)):
            step.late_actor = self._actor_forward(step.theirs)
        proximal = step.early_proximal | {
            i: row.double().numpy() for i, row in zip(step.theirs, step.late_actor.first, strict=True)
        }
        self._await_rewards(order.sequence_ids)
        scored = self._scored(order.sequence_ids, [values[i] for i in order.sequence_ids])
        self._scores = {i: replace(row, proximal_logprobs=proximal.get(i)) for i, row in scored.items()}

    def wait_share(self) -> dict[int, Scored]:
        """See `Partnership.wait_share`."""
        return self._scores

    def start_late_update(self, update: LateUpdate) -> None:
        """The critic's optimizer step, and the partner's part of the actor's gradient into the shared tensors."""
        step, trainer = self.step, self.trainer
        assert step.late_critic is not None
        assert step.late_actor is not None
        with self.trace.span("critic", "update-critic", rows=len(step.late)):
            self._critic_backward(step.late_critic, step.late, update.returns, update.step)
            for parameter in trainer.optimizer.parameters:
                if parameter.grad is not None:
                    parameter.grad /= update.tokens
            norm = trainer.optimizer.apply(update.step, "critic")
            trainer.optimizer.begin(0)  # the next step's early orders add to what is there
        with self.trace.span("actor", "update-actor", rows=len(step.theirs)):
            self._actor_backward(step.late_actor, update)
            self._hand_over_gradients(update)
        loss, clipped = trainer.ranks.total([step.critic_loss, step.critic_clipped])
        self._metrics = {
            "critic/vf_loss": loss / update.tokens,
            "critic/vf_clipfrac": clipped / update.tokens,
            "critic/grad_norm": norm,
            "critic/lr": trainer.optimizer.rates.at(update.step),
            "entropy": step.entropy,
        }
        for sequence_id in [*step.early_values, *step.late]:
            self._drop(sequence_id)
        self.step = StepState()

    def wait_late_update(self) -> dict[str, float]:
        """See `Partnership.wait_late_update`."""
        return self._metrics

    def _rows(self, ids: list[int]) -> tuple[list[NDArray[np.int64]], list[int]]:
        return [self.tracks[i].tokens for i in ids], [self.tracks[i].prompt_length for i in ids]

    def _critic_forward(self, ids: list[int]) -> HeldForward:
        return self.trainer.hold(*self._rows(ids))

    def _actor_forward(self, ids: list[int]) -> HeldForward:
        return self.actor.hold(*self._rows(ids), supports=[self.tracks[i].support for i in ids])

    def _critic_backward(self, held: HeldForward, ids: list[int], returns: dict[int, NDArray[np.float64]], number: int) -> None:
        """Add the gradients of the summed value loss; they are divided by the batch's tokens before the optimizer steps."""
        figures = Figures()
        for rows, (values,) in held.groups():
            targets = torch.from_numpy(np.concatenate([returns[ids[r]] for r in rows])).to(values)
            self.trainer.backward(values, values.detach(), targets, 1, figures)
        loss, clipped = self.trainer.told(figures, number)
        self.step.critic_loss += loss
        self.step.critic_clipped += clipped

    def _gather(self, ids: list[int], weighted: list[Tensor], weights: list[Tensor], kl_coefficient: float) -> None:
        """Two backward passes over one graph: −Σ w·A·log p, with what does not depend on A, and −Σ w·log p."""
        parameters = self.actor.optimizer.parameters
        gathered = self.step.gathered
        if gathered is None:
            gathered = self.step.gathered = Gathered(
                [torch.zeros_like(p) for p in parameters], [torch.zeros_like(p) for p in parameters]
            )
        held = self._actor_forward(ids)
        self.step.early_proximal |= {i: row.double().numpy() for i, row in zip(ids, held.first, strict=True)}
        for rows, (logp, entropy) in held.groups():
            weighted_M, weights_M = (torch.cat([column[r] for r in rows]).to(logp) for column in (weighted, weights))
            advantage = -(weighted_M * logp).sum()
            plain = -(weights_M * logp).sum()
            _accumulate(gathered.advantage, torch.autograd.grad(advantage, parameters, retain_graph=True))
            rest = self._rest([ids[r] for r in rows], logp, entropy, kl_coefficient)
            if rest is not None:
                _accumulate(self.gradients, torch.autograd.grad(rest, parameters, retain_graph=True))
            _accumulate(gathered.plain, torch.autograd.grad(plain, parameters))
            self.step.entropy += float(entropy.detach().sum())

    def _rest(self, ids: list[int], logp: Tensor, entropy: Tensor, kl_coefficient: float) -> Tensor | None:
        """The part of the policy loss that does not depend on the advantages; None when there is none."""
        rest = None
        if self.ppo.entropy_coefficient:
            rest = -self.ppo.entropy_coefficient * entropy.sum()
        if self.ppo.kl.placement == "loss":
            reference = torch.cat([torch.cat(self.tracks[i].reference_logprobs) for i in ids]).to(logp)
            penalty = kl_coefficient * kl_estimate(logp, reference, self.ppo.kl.estimator).sum()
            rest = penalty if rest is None else rest + penalty
        return rest

    def _actor_backward(self, held: HeldForward, update: LateUpdate) -> None:
        for rows, (logp, entropy) in held.groups():
            ids = [self.step.theirs[r] for r in rows]
            weighted = torch.from_numpy(np.concatenate([update.advantages[i] for i in ids])).to(logp)
            loss = -(weighted * logp).sum()
            rest = self._rest(ids, logp, entropy, update.kl_coefficient)
            _accumulate(
                self.gradients,
                torch.autograd.grad(loss if rest is None else loss + rest, self.actor.optimizer.parameters),
            )
            self.step.entropy += float(entropy.detach().sum())

    def _hand_over_gradients(self, update: LateUpdate) -> None:
        gathered = self.step.gathered
        for number, gradient in enumerate(self.gradients):
            if gathered is not None:
                gradient += update.scale * (gathered.advantage[number] - update.mean * gathered.plain[number])
            gradient /= update.tokens


def _accumulate(sums: list[Tensor], gradients: tuple[Tensor, ...]) -> None:
    torch._foreach_add_(sums, list(gradients))


def in_shared_memory(tensor: Tensor) -> Tensor:
    """The same tensor, its storage moved to where other processes can see it."""
    shared: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return shared
