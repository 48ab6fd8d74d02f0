"""The actor's side of a PPO step: proximal log-probs before, clipped policy loss after."""

from __future__ import annotations

import math
from collections.abc import Generator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from oppo_contract.sections.training import PLAIN_TRAINING
from oppo_contract.spec import Ppo, Training
from oppo_core.distributed.process_group import ALONE, Ranks
from oppo_core.models.activation_checkpointing import prepare
from oppo_core.models.host_device import to_device
from oppo_core.models.model_io import export_model, restore_weights, save_weights
from oppo_core.models.protocol import Network
from oppo_core.ppo.deferred_metrics import Figures
from oppo_core.ppo.ema import MovingAverage
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.logprobs import logprobs_of, told_tokens
from oppo_core.ppo.losses import kl_estimate, policy_loss
from oppo_core.ppo.lr_schedule import actor_rates
from oppo_core.ppo.microbatching import mini_batch_rows, pass_costs, response_states
from oppo_core.ppo.oom_retry import PassBudget
from oppo_core.ppo.optimizer import NonFiniteError, Optimizer, size_of
from oppo_core.ppo.ptx_mix import PretrainingMix
from oppo_core.ppo.retained_forward import HeldForward
from oppo_core.ppo.stepwise import Stepwise
from oppo_core.rollout.sampling_support import joined
from oppo_core.rollout.sequence import Support
from oppo_core.training.backends import plain
from oppo_core.training.protocol import BackendFactory

WEIGHTS, MOMENTS = "actor", "actor-optimizer.safetensors"
AVERAGE, PRECISE_AVERAGE = "actor-ema", "actor-ema.safetensors"


@dataclass(slots=True)
class TokenSums:
    """Sums over the tokens of one update, divided once at the end."""

    tokens: int = 0
    loss: float = 0.0
    clipped: float = 0.0
    log_ratio: float = 0.0
    entropy: float = 0.0
    texts: float = 0.0
    text_tokens: int = 0

    def add(self, loss: float, clipped: float, log_ratio: float, entropy: float) -> None:
        """Sums of one more pass."""
        self.loss += loss
        self.clipped += clipped
        self.log_ratio += log_ratio
        self.entropy += entropy


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """What was computed of a batch's `rows` before it was complete: their gradients, a tensor a parameter, divided by the batch's
    tokens, and their summed policy loss and entropy.
    """

    rows: frozenset[int]
    gradients: list[Tensor]
    loss: float
    entropy: float


class Acting(Protocol):
    """What the training loop asks of the actor's trainer, real or simulated."""

    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], supports: Rows[Support] = ()) -> list[Tensor]:
        """Log-prob of each response token under the present weights, a tensor a sequence.

        `supports`: what the tokens were sampled among, a sequence each; none where nothing was filtered.
        `update` may rely on it that the same rows come next: with one optimizer step a batch their graph is kept.
        """

    def update(self, experience: Experience, step: int, kl_coefficient: float) -> dict[str, float]:
        """Train on the batch of PPO step `step` (from 0); returns `actor/*` metrics."""

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        """Write the actor as a model folder with the tokenizer of `source`, and the optimizer's state, into `folder`.

        Every rank calls it, and the first one writes.
        """

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote."""

    def forget(self) -> None:
        """Drop what `logprobs` has kept for an update that does not come."""

    @property
    def saves_bytes(self) -> int:
        """About how much `save` writes."""


class ActorTrainer:
    """Trains the policy network on an `Experience`: on this rank's rows of it, together with the other ranks."""

    def __init__(
        self, network: Network, ppo: Ppo, temperature: float, seed: int, steps: int, ranks: Ranks = ALONE,
        backend: BackendFactory = plain, training: Training = PLAIN_TRAINING,
    ) -> None:  # fmt: skip
        """`steps`: of the whole run, over which the learning rate falls. `training`: what its passes keep."""
        self.ranks = ranks
        self.network = network
        self.ppo = ppo
        self.temperature = temperature
        self.training = training
        self.seed = seed
        prepare(network, training)
        self.optimizer = backend(network, actor_rates(ppo, steps), ppo.weight_decay, ppo.max_grad_norm, ranks)
        self.budget = PassBudget(ppo.micro_batch_tokens, isinstance(self.optimizer, Optimizer), "actor")
        self.average: MovingAverage | None = None
        self.mix: PretrainingMix | None = None
        self._held: HeldForward | None = None

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        """See `Acting.save`."""
        state = self.optimizer.state()
        if not self.ranks.first:
            return
        export_model(self.network, folder / WEIGHTS, source, eos, pad)
        save_weights(state, folder / MOMENTS)
        if self.average is not None:
            with self.average.in_place():
                export_model(self.network, folder / AVERAGE, source, eos, pad)
            save_weights(self.average.state(), folder / PRECISE_AVERAGE)

    def load(self, folder: Path) -> None:
        """See `Acting.load`."""
        self.forget()
        restore_weights(self.network, folder / WEIGHTS)
        self.optimizer.load_state(load_file(folder / MOMENTS))
        if self.average is not None:
            self.average.load_state(load_file(folder / PRECISE_AVERAGE))

    def forget(self) -> None:
        """See `Acting.forget`."""
        self._held = None

    @property
    def saves_bytes(self) -> int:
        """See `Acting.saves_bytes`: the weights, and what the optimizer keeps of each that is trained."""
        average = 0 if self.average is None else size_of(self.network.parameters()) + self.average.saves_bytes
        return size_of(self.network.parameters()) + self.optimizer.saves_bytes + average

    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], supports: Rows[Support] = ()) -> list[Tensor]:
        """See `Acting.logprobs`."""
        one_step = self.ppo.optimizer_steps == 1

        def read() -> tuple[HeldForward, list[Tensor]]:
            held = self.hold(tokens, prompt_lengths, None if one_step else 0, supports)
            return held, held.first

        held, logprobs = self.budget.shrinking("the actor's forward pass", read)
        self._held = held if one_step else None
        return logprobs

    def hold(
        self,
        tokens: list[NDArray[np.int64]],
        prompt_lengths: list[int],
        kept: int | None = None,
        supports: Rows[Support] = (),
    ) -> HeldForward:
        """Log-probs and entropies of the response tokens; graphs are kept up to `kept` tokens, default a micro-batch."""

        def compute(rows: list[int]) -> tuple[Tensor, Tensor]:
            support = joined(supports[r] for r in rows) if supports else []
            chosen = [tokens[r] for r in rows], [prompt_lengths[r] for r in rows]
            return self.optimizer.forward(partial(self._forward, rows=chosen, support=support), self.network)

        lengths = [len(ids) for ids in tokens]
        sizes = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
        budget = self.budget.tokens
        if kept is None:
            kept = budget if self.optimizer.holds_graphs else 0
        return HeldForward(compute, lengths, sizes, budget, kept, pass_costs(self.network), self.training.packs)

    def update(
        self, experience: Experience, step: int, kl_coefficient: float, early: EarlyPart | None = None
    ) -> dict[str, float]:
        """All epochs and mini-batches of PPO step `step` (from 0); returns `actor/*` metrics.

        `early`: what is known of some rows, with one optimizer step a batch.

        Raises:
            NonFiniteError: the loss or its gradient is NaN or infinite.
        """
        sums = TokenSums()
        norms = [
            self.optimizer.apply(step, "actor") for _ in self._gradients(experience, step, kl_coefficient, sums, early)
        ]  # fmt: skip
        return self._finish(sums, step, norms)

    def stepwise(self, experience: Experience, step: int, kl_coefficient: float) -> Stepwise:
        """`update`, pausing before each optimizer step."""
        sums = TokenSums()
        gradients = self._gradients(experience, step, kl_coefficient, sums)
        return Stepwise(self.optimizer, gradients, partial(self._finish, sums, step), step, "actor")

    def _finish(self, sums: TokenSums, step: int, norms: list[float]) -> dict[str, float]:
        """After the last optimizer step of a PPO step: the moving average, and the metrics."""
        if self.rests(step):
            return self.rest(step)
        self.follow(step)
        return self.metrics(sums, step, norms)

    def follow(self, step: int) -> None:
        """The moving average, where there is one, follows the weights of a step that has trained them."""
        if self.average is not None and not self.rests(step):
            self.average.follow()

    def _gradients(
        self, experience: Experience, step: int, kl_coefficient: float, sums: TokenSums, early: EarlyPart | None = None
    ) -> Generator[None]:
        """The gradients of one optimizer step after the other: each is to be taken before the next one is asked for.

        None while only the critic is trained. Adds to `sums`.
        """
        for epoch in range(0 if self.rests(step) else self.ppo.epochs):
            for number, rows in enumerate(self._mini_batches(experience.own, step, epoch)):
                total = int(self.ranks.total([int(experience.mask[rows].sum())])[0])
                late = rows if early is None else [row for row in rows if row not in early.rows]
                with self.ranks.agreed(NonFiniteError):
                    add = partial(self._add_gradients, experience, late, kl_coefficient, total, sums, step, number)
                    self.budget.shrinking("the actor's update", add)
                    self.optimizer.pad_passes()
                self._add_early(early, sums)
                sums.tokens += total
                yield

    def _add_early(self, early: EarlyPart | None, sums: TokenSums) -> None:
        if early is None:
            return
        assert isinstance(self.optimizer, Optimizer)  # the spec has refused others
        self.optimizer.add_gradients(early.gradients)
        sums.loss, sums.entropy = sums.loss + early.loss, sums.entropy + early.entropy

    def _add_gradients(
        self, experience: Experience, rows: list[int], kl_coefficient: float, total: int, sums: TokenSums, step: int, number: int
    ) -> None:
        """All gradients of mini-batch `number`. When memory runs out, `sums` are as they were."""
        before = replace(sums)
        try:
            self.accumulate(experience, rows, kl_coefficient, total, sums, step, following=self._texts(step, number))
            self.mix_in(step, number, sums)
        except torch.OutOfMemoryError:
            for field in fields(sums):
                setattr(sums, field.name, getattr(before, field.name))
            raise

    def mix_in(self, step: int, number: int, sums: TokenSums) -> None:
        """The gradient of the texts that go with mini-batch `number`, where texts are mixed in."""
        if self.mix is not None:
            loss, tokens = self.mix.add_gradient(self.network, self.optimizer, step, number, self.ppo.mini_batches, self.ranks)
            sums.texts, sums.text_tokens = sums.texts + loss, sums.text_tokens + tokens

    def _texts(self, step: int, number: int) -> int:
        """Backward passes that `mix_in` makes."""
        return 0 if self.mix is None else self.mix.passes(step, number, self.ppo.mini_batches, self.ranks)

    def rests(self, step: int) -> bool:
        """Whether only the critic is trained in PPO step `step`."""
        return step < self.ppo.value_warmup_steps

    def rest(self, step: int) -> dict[str, float]:
        """Metrics of a step without training."""
        self._held = None
        return {"actor/lr": self.optimizer.rates.at(step)}

    def _mini_batches(self, own: list[int], step: int, epoch: int) -> list[list[int]]:
        parts = mini_batch_rows(len(own), self.ppo.mini_batches, self.seed, step, epoch, self.ppo.group_size)
        return [[own[place] for place in part] for part in parts]

    def metrics(self, sums: TokenSums, step: int, norms: list[float]) -> dict[str, float]:
        """`actor/*` of PPO step `step`, from sums over its tokens and the gradient norms of its optimizer steps.

        `sums.tokens` counts those of all ranks, the other sums are this rank's.
        """
        loss, clipped, log_ratio, entropy, text_loss, text_tokens = self.ranks.total(
            [sums.loss, sums.clipped, sums.log_ratio, sums.entropy, sums.texts, sums.text_tokens]
        )
        texts = {"actor/ptx_loss": text_loss / text_tokens} if text_tokens else {}
        return texts | {
            "actor/pg_loss": loss / sums.tokens,
            "actor/pg_clipfrac": clipped / sums.tokens,
            "actor/ppo_kl": -log_ratio / sums.tokens,
            "actor/entropy": entropy / sums.tokens,
            "actor/grad_norm": float(np.mean(norms)),
            "actor/lr": self.optimizer.rates.at(step),
        }

    def accumulate(
        self, experience: Experience, rows: list[int], kl_coefficient: float, total: int, sums: TokenSums, step: int,
        following: int = 0,
    ) -> None:  # fmt: skip
        """Gradients of some rows of step `step`'s batch, divided by `total` tokens, however they are cut into micro-batches.

        Takes the graphs that `logprobs` has kept, when it has, for the same rows in the same order. `following`: backward passes
        that come after these, before the step is taken.
        """
        forward, figures = self._take_held(experience, rows), Figures()
        self.optimizer.begin(forward.passes + following)
        for group, (logp, entropy) in forward.groups():
            loss = self._loss([rows[i] for i in group], experience, logp, entropy, kl_coefficient, figures)
            self.optimizer.backward(loss / total)
        for whole, *told in figures.read():
            if not math.isfinite(whole):
                self.optimizer.fault(
                    f"the policy loss is {whole} at step {step + 1}; look at critic/score/* and objective/kl of the steps before"
                )
            sums.add(*told)

    def _take_held(self, experience: Experience, rows: list[int]) -> HeldForward:
        held, self._held = self._held, None
        if held is None:
            tokens, prompts = [experience.tokens[r] for r in rows], [experience.prompt_lengths[r] for r in rows]
            held = self.hold(tokens, prompts, 0, [experience.sequences[r].support for r in rows])
        return held

    def _loss(
        self, rows: list[int], experience: Experience, logp: Tensor, entropy: Tensor, kl_coefficient: float, figures: Figures
    ) -> Tensor:
        """The summed loss of some rows; notes it, and the sums that `TokenSums.add` takes."""
        losses, clipped = self.policy_losses(rows, experience, logp, experience.advantages)
        loss, rest = losses.sum(), self.regularization(rows, experience, logp, entropy, kl_coefficient)
        loss = loss if rest is None else loss + rest
        proximal = _tokens_of(experience.proximal_logp, rows, experience.mask, logp)
        figures.note(loss, losses.sum(), clipped.sum(), (logp.detach() - proximal).sum(), entropy.sum())
        return loss

    def policy_losses(
        self, rows: list[int], experience: Experience, logp: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The policy loss of each response token of some rows, and where the clip was active. `advantages`: of all rows."""
        proximal, advantages, weights = (
            _tokens_of(column, rows, experience.mask, logp)
            for column in (experience.proximal_logp, advantages, experience.weights)
        )
        return policy_loss(logp, proximal, advantages, weights, self.ppo.clip_range, self.ppo.dual_clip)

    def regularization(
        self, rows: list[int], experience: Experience, logp: Tensor, entropy: Tensor, kl_coefficient: float
    ) -> Tensor | None:
        """What of the loss does not depend on advantages, summed over some rows: entropy bonus and KL penalty; None: nothing."""
        terms = []
        if self.ppo.entropy_coefficient:
            terms.append(-self.ppo.entropy_coefficient * entropy.sum())
        if self.ppo.kl.placement == "loss":
            reference = _tokens_of(experience.reference_logp, rows, experience.mask, logp)
            terms.append(kl_coefficient * kl_estimate(logp, reference, self.ppo.kl.estimator).sum())
        return torch.stack(terms).sum() if terms else None

    def _forward(
        self, network: Network, rows: tuple[list[NDArray[np.int64]], list[int]], support: Support
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [M] of the response tokens among their support, rows (tokens, prompt lengths) in order."""
        tokens, prompt_lengths = rows
        states = response_states(network, tokens, prompt_lengths, self.training.packs)
        told = told_tokens(tokens, prompt_lengths, states)
        trains_entropy = bool(self.ppo.entropy_coefficient)
        return logprobs_of(network, states, told, support, self.temperature, trains_entropy, self.training.recompute != "off")


def _tokens_of(column: Tensor, rows: list[int], mask: Tensor, like: Tensor) -> Tensor:
    """A column's numbers [M] at the response tokens of some rows, on the device and in the precision of `like`."""
    return to_device(column[rows][mask[rows]], like.device).to(like)
