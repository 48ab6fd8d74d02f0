"""Actor trainer: proximal log-probs and the clipped policy loss."""

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
from torch import Tensor

from oppo_contract.sections.training import PLAIN_TRAINING
from oppo_contract.spec import Ppo, Training
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.models.activation_checkpointing import prepare_for_training
from oppo_core.models.adapters import size_and_adapters
from oppo_core.models.microbatching import ONE_TOKEN, mini_batch_rows, pass_costs, response_states
from oppo_core.models.model_io import restore_weights, save_actor
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.models.sharded_weights import copy_trained
from oppo_core.models.tensor_files import Writer, load_tensors, save_tensors
from oppo_core.ppo.deferred_metrics import DeferredMetrics, TokenSums
from oppo_core.ppo.ema import MovingAverage
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.logprobs import response_tokens, token_logprobs
from oppo_core.ppo.policy_objective import PolicyObjective
from oppo_core.ppo.ptx_mix import PretrainingMix
from oppo_core.ppo.retained_forward import RetainedForward
from oppo_core.ppo.stepwise import Stepwise
from oppo_core.rollout.sampling_support import concat_supports
from oppo_core.rollout.sequence import Support
from oppo_core.training.backends import plain
from oppo_core.training.lr_schedule import actor_rates
from oppo_core.training.optimizer import NonFiniteError, Optimizer, tensor_bytes
from oppo_core.training.protocol import BackendFactory

WEIGHTS, MOMENTS = "actor", "actor-optimizer.safetensors"
EMA, EMA_MASTER = "actor-ema", "actor-ema.safetensors"


@dataclass(frozen=True, slots=True)
class EarlyPart:
    """Early results for some `rows` of a batch: gradients (one tensor per parameter, divided by the batch's tokens), and
    summed policy loss and entropy.
    """

    rows: frozenset[int]
    gradients: list[Tensor]
    loss: float
    entropy: float


class ActorProtocol(Protocol):
    """Interface between the training loop and the actor's trainer, real or simulated."""

    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], supports: Rows[Support] = ()) -> list[Tensor]:
        """Log-prob of each response token under the current weights, one tensor per sequence.

        `supports`: supports of the tokens, one entry per sequence, with sampling filters. With one optimizer step per batch the
        autograd graph is retained, so `update` must follow with the same rows.
        """

    def update(self, experience: Experience, step: int, kl_coefficient: float) -> dict[str, float]:
        """Train on the batch of PPO step `step` (from 0); returns `actor/*` metrics."""

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        """Write the actor as a model folder with the tokenizer of `source`, and the optimizer state, into `folder`.

        Every rank must call it; the first one writes, and every rank the shards that it has.
        """

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""

    def hand_over(self) -> int:
        """After `update`: copy the trained weights to the network that decodes, where that is another one. Collective.

        Returns their size in bytes.
        """

    def forget(self) -> None:
        """Drop the forward pass retained by `logprobs`."""

    @property
    def saves_bytes(self) -> int:
        """Approximate size of what `save` writes."""


class ActorTrainer:
    """Trains the policy network on this rank's rows of an `Experience`, data-parallel with the other ranks."""

    def __init__(
        self, network: Network, ppo: Ppo, temperature: float, seed: int, steps: int, ranks: Ranks = SINGLE,
        backend: BackendFactory = plain, training: Training = PLAIN_TRAINING, max_new_tokens: int = 1,
        decoding: Network | None = None,
    ) -> None:  # fmt: skip
        """`steps`: PPO steps of the run, for the learning-rate schedule. `training`: checkpointing and packing of passes.

        `max_new_tokens`: divisor of `loss_aggregation: token_sum`. `decoding`: the network that decodes, with whole weights,
        where `network` is sharded.
        """
        self.ranks = ranks
        self.network = network
        self.decoding = decoding if decoding is not None else network
        self.ppo = ppo
        self.temperature = temperature
        self.training = training
        self.objective = PolicyObjective(ppo, max_new_tokens)
        self.seed = seed
        prepare_for_training(network, training)
        rates = actor_rates(ppo, steps, *size_and_adapters(network))
        self.optimizer = backend(network, rates, ppo.weight_decay, ppo.max_grad_norm, ranks)
        self.budget = PassBudget(ppo.micro_batch_tokens, isinstance(self.optimizer, Optimizer), "actor")
        self.average: MovingAverage | None = None
        self.mix: PretrainingMix | None = None
        self.writer = Writer()
        self._retained: RetainedForward | None = None

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        state = self.writer.copy(self.optimizer.state())
        self.writer.add(partial(save_tensors, state, folder / MOMENTS, self.ranks))
        if not self.ranks.first:
            return
        save_actor(self.decoding, folder / WEIGHTS, source, eos, pad, self.writer)
        if self.average is not None:
            with self.average.swapped_in():
                save_actor(self.decoding, folder / EMA, source, eos, pad)
            save_tensors(self.average.state(), folder / EMA_MASTER, self.ranks)

    def load(self, folder: Path) -> None:
        self.forget()
        restore_weights(self.decoding, folder / WEIGHTS)
        if self.network is not self.decoding:
            copy_trained(self.decoding.parameters(), self.network.parameters())
        self.optimizer.load_state(load_tensors(folder / MOMENTS, self.optimizer.shards))
        if self.average is not None:
            self.average.load_state(load_tensors(folder / EMA_MASTER, {}))

    def hand_over(self) -> int:
        """Gather the trained weights into the network that decodes, one at a time, if it is another one. Collective."""
        if self.network is self.decoding:
            return 0
        with self.ranks.rank_errors("gathering the weights"):
            return copy_trained(self.network.parameters(), self.decoding.parameters())

    def forget(self) -> None:
        self._retained = None

    @property
    def saves_bytes(self) -> int:
        """Trained weights, optimizer state and the moving average."""
        weights = tensor_bytes(weight for weight in self.decoding.parameters() if weight.requires_grad)
        average = 0 if self.average is None else weights + self.average.saves_bytes
        return weights + self.optimizer.saves_bytes + average

    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], supports: Rows[Support] = ()) -> list[Tensor]:
        one_step = self.ppo.optimizer_steps == 1

        def compute() -> tuple[RetainedForward, list[Tensor]]:
            forward = self.forward(tokens, prompt_lengths, None if one_step else 0, supports)
            return forward, forward.first

        forward, logprobs = self.budget.run("the actor's forward pass", compute)
        self._retained = forward if one_step else None
        return logprobs

    def forward(
        self,
        tokens: list[NDArray[np.int64]],
        prompt_lengths: list[int],
        kept: int | None = None,
        supports: Rows[Support] = (),
    ) -> RetainedForward:
        """Log-probs and entropies of the response tokens; retains graphs up to `kept` tokens (default: as configured)."""

        def compute(rows: list[int]) -> tuple[Tensor, Tensor]:
            support = concat_supports(supports[r] for r in rows) if supports else []
            chosen = [tokens[r] for r in rows], [prompt_lengths[r] for r in rows]
            return self.optimizer.forward(partial(self._forward, rows=chosen, support=support), self.network)

        lengths = [len(ids) for ids in tokens]
        sizes = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]
        budget = self.budget.tokens
        if kept is None:
            kept = budget * self.training.retained_passes if self.optimizer.holds_graphs else 0
        reads = partial(self.optimizer.reads, shortest=self._shortest_pass)
        return RetainedForward(compute, lengths, sizes, budget, kept, pass_costs(self.network), self.training.packs, reads)

    def update(
        self, experience: Experience, step: int, kl_coefficient: float, early: EarlyPart | None = None
    ) -> dict[str, float]:
        """All epochs and mini-batches of PPO step `step` (from 0); returns `actor/*` metrics.

        `early`: results of rows trained early; requires one optimizer step per batch.

        Raises:
            NonFiniteError: the loss or its gradient is NaN or infinite.
        """
        sums = TokenSums()
        norms = [
            self.optimizer.apply(step, "actor") for _ in self._gradients(experience, step, kl_coefficient, sums, early)
        ]  # fmt: skip
        return self._finish(sums, step, norms)

    def stepwise(self, experience: Experience, step: int, kl_coefficient: float) -> Stepwise:
        """Like `update`, but pauses before each optimizer step."""
        sums = TokenSums()
        gradients = self._gradients(experience, step, kl_coefficient, sums)
        return Stepwise(self.optimizer, gradients, partial(self._finish, sums, step), step, "actor")

    def _finish(self, sums: TokenSums, step: int, norms: list[float]) -> dict[str, float]:
        """After the last optimizer step of a PPO step: update the moving average and compute metrics."""
        if self.is_critic_warmup(step):
            return self.warmup_metrics(step)
        self.update_average(step)
        return self.metrics(sums, step, norms)

    def update_average(self, step: int) -> None:
        """Update the moving average, if configured, after a step that trained the actor."""
        if self.average is not None and not self.is_critic_warmup(step):
            self.average.update()

    def _gradients(
        self, experience: Experience, step: int, kl_coefficient: float, sums: TokenSums, early: EarlyPart | None = None
    ) -> Generator[None]:
        """Yield after the gradients of each optimizer step; the caller must take the step before resuming. Adds to `sums`.

        Yields nothing during critic warm-up.
        """
        for epoch in range(0 if self.is_critic_warmup(step) else self.ppo.epochs):
            batch = experience.batch.sequences
            row_at = {place: row for row, place in enumerate(experience.batch.places)}
            for number, places in enumerate(self._mini_batches(len(batch), step, epoch)):
                rows = [row_at[place] for place in places if place in row_at]
                total = sum(batch[place].length for place in places)
                late = rows if early is None else [row for row in rows if row not in early.rows]
                with self.ranks.raise_on_all(NonFiniteError):
                    divisor = total if self.ppo.loss_aggregation == "token_mean" else len(places)
                    add = partial(self._add_gradients, experience, late, kl_coefficient, divisor, sums, step, number)
                    self.budget.run("the actor's update", add)
                    self.optimizer.pad_passes(self._shortest_pass)
                self._add_early(early, sums)
                sums.tokens += total
                sums.divisor += divisor
                yield

    def _add_early(self, early: EarlyPart | None, sums: TokenSums) -> None:
        if early is None:
            return
        assert isinstance(self.optimizer, Optimizer)  # enforced by spec validation
        self.optimizer.add_gradients(early.gradients)
        sums.loss, sums.entropy = sums.loss + early.loss, sums.entropy + early.entropy

    def _add_gradients(
        self,
        experience: Experience,
        rows: list[int],
        kl_coefficient: float,
        divisor: int,
        sums: TokenSums,
        step: int,
        number: int,
    ) -> None:
        """Accumulate all gradients of mini-batch `number`. Restores `sums` when out of memory."""
        before = replace(sums)
        try:
            self.accumulate(experience, rows, kl_coefficient, divisor, sums, step, following=self._mix_passes(step, number))
            self.mix_in(step, number, sums)
        except torch.OutOfMemoryError:
            for field in fields(sums):
                setattr(sums, field.name, getattr(before, field.name))
            raise

    def mix_in(self, step: int, number: int, sums: TokenSums) -> None:
        """Add the gradient of the pretraining texts of mini-batch `number`, if any (PPO-ptx)."""
        if self.mix is not None:
            loss, tokens = self.mix.add_gradient(self.network, self.optimizer, step, number, self.ppo.mini_batches, self.ranks)
            sums.texts, sums.text_tokens = sums.texts + loss, sums.text_tokens + tokens

    def _mix_passes(self, step: int, number: int) -> int:
        """Number of backward passes in `mix_in`."""
        return 0 if self.mix is None else self.mix.passes(step, number, self.ppo.mini_batches, self.ranks)

    def is_critic_warmup(self, step: int) -> bool:
        """Whether PPO step `step` trains only the critic (`ppo.value_warmup_steps`)."""
        return step < self.ppo.value_warmup_steps

    def warmup_metrics(self, step: int) -> dict[str, float]:
        """Metrics of a step that does not train the actor."""
        self._retained = None
        return {"actor/lr": self.optimizer.rates.at(step)}

    def _mini_batches(self, rows: int, step: int, epoch: int) -> list[list[int]]:
        return mini_batch_rows(rows, self.ppo.mini_batches, self.seed, step, epoch, self.ppo.group_size)

    def metrics(self, sums: TokenSums, step: int, norms: list[float]) -> dict[str, float]:
        """`actor/*` metrics of PPO step `step`, from token sums and the gradient norms of its optimizer steps.

        `sums.tokens` is the total of all ranks; the other sums are this rank's.
        """
        loss, clipped, log_ratio, entropy, text_loss, text_tokens = self.ranks.total(
            [sums.loss, sums.clipped, sums.log_ratio, sums.entropy, sums.texts, sums.text_tokens]
        )
        texts = {"actor/ptx_loss": text_loss / text_tokens} if text_tokens else {}
        return texts | {
            "actor/pg_loss": loss / sums.divisor,
            "actor/pg_clipfrac": clipped / sums.tokens,
            "actor/ppo_kl": -log_ratio / sums.tokens,
            "actor/entropy": entropy / sums.tokens,
            "actor/grad_norm": float(np.mean(norms)),
            "actor/lr": self.optimizer.rates.at(step),
        }

    def accumulate(
        self, experience: Experience, rows: list[int], kl_coefficient: float, divisor: int, sums: TokenSums, step: int,
        following: int = 0,
    ) -> None:  # fmt: skip
        """Accumulate gradients of some rows of step `step`'s batch, divided by `divisor`, micro-batch by micro-batch.

        Uses the graphs retained by `logprobs`, if any; they must be of the same rows in the same order. `following`: further
        backward passes before the optimizer step.
        """
        forward, metrics = self._take_retained(experience, rows), DeferredMetrics()
        self.optimizer.begin(forward.passes + following)
        for group, (logp, entropy) in forward.groups():
            loss = self.objective.loss([rows[i] for i in group], experience, logp, entropy, kl_coefficient, metrics)
            self.optimizer.backward(loss / divisor)
        for loss_sum, *pass_sums in metrics.read():
            if not math.isfinite(loss_sum):
                self.optimizer.fault(
                    f"the policy loss is {loss_sum} at step {step + 1};"
                    " look at critic/score/* and objective/kl of the steps before"
                )
            sums.add(*pass_sums)

    def _take_retained(self, experience: Experience, rows: list[int]) -> RetainedForward:
        forward, self._retained = self._retained, None
        if forward is None:
            tokens, prompts = [experience.tokens[r] for r in rows], [experience.prompt_lengths[r] for r in rows]
            forward = self.forward(tokens, prompts, 0, [experience.sequences[r].support for r in rows])
        return forward

    def _shortest_pass(self, network: Network) -> tuple[Tensor, Tensor]:
        """The pass that a rank makes where other ranks have more rows."""
        return self._forward(network, ONE_TOKEN, [])

    def _forward(
        self, network: Network, rows: tuple[list[NDArray[np.int64]], list[int]], support: Support
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [M] of the response tokens over their support; `rows`: tokens and prompt lengths."""
        tokens, prompt_lengths = rows
        states = response_states(network, tokens, prompt_lengths, self.training.packs)
        targets = response_tokens(tokens, prompt_lengths, states)
        trains_entropy = bool(self.ppo.entropy_coefficient)
        return token_logprobs(
            network, states, targets, support, self.temperature, trains_entropy, self.training.recompute != "off"
        )
