"""Critic trainer. It may run in another process than the actor."""

from __future__ import annotations

import math
from collections.abc import Container, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.sections.training import PLAIN_TRAINING
from oppo_contract.spec import Ppo, Training
from oppo_core.distributed.process_group import SINGLE, Ranks
from oppo_core.models.activation_checkpointing import prepare_for_training
from oppo_core.models.adapters import load_trained_weights, size_and_adapters, trained_weights
from oppo_core.models.host_device import to_device
from oppo_core.models.microbatching import ONE_TOKEN, mini_batch_rows, pass_costs, response_states
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.models.tensor_files import Writer, load_tensors, save_tensors
from oppo_core.models.upcast import precise
from oppo_core.ppo.deferred_metrics import DeferredMetrics
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import value_loss
from oppo_core.ppo.retained_forward import RetainedForward
from oppo_core.ppo.stepwise import Stepwise
from oppo_core.training.backends import plain
from oppo_core.training.lr_schedule import critic_rates
from oppo_core.training.optimizer import NonFiniteError, Optimizer, tensor_bytes
from oppo_core.training.protocol import BackendFactory

WEIGHTS, MOMENTS = "critic.safetensors", "critic-optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """Targets for sequences that the scorers hold: returns and step-start values, one array per sequence.

    `places`: where they are in the batch of all ranks, which has `batch` rows.
    """

    step: int
    batch: int
    places: list[int]
    sequence_ids: list[int]
    prompt_lengths: list[int]
    returns: list[NDArray[np.float64]]
    old_values: list[NDArray[np.float64]]

    def without(self, sequence_ids: Container[int]) -> CriticUpdate:
        """The update without some sequences."""
        rows = [row for row, sequence_id in enumerate(self.sequence_ids) if sequence_id not in sequence_ids]
        return replace(
            self,
            places=[self.places[row] for row in rows],
            sequence_ids=[self.sequence_ids[row] for row in rows],
            prompt_lengths=[self.prompt_lengths[row] for row in rows],
            returns=[self.returns[row] for row in rows],
            old_values=[self.old_values[row] for row in rows],
        )


def build_critic_update(experience: Experience, step: int) -> CriticUpdate:
    """The critic's targets of a step: this rank's rows without padding."""
    e, lengths = experience, experience.mask.sum(-1).tolist()
    ids = [sequence.sequence_id for sequence in e.sequences]
    returns, values = (
        [row[:length].numpy() for row, length in zip(column, lengths, strict=True)] for column in (e.returns, e.values)
    )
    return CriticUpdate(step, len(e.batch.sequences), e.batch.places, ids, e.prompt_lengths, returns, values)


@dataclass(slots=True)
class ValueSums:
    """Sums over the tokens of one update: `loss` and `clipped` of this rank, `tokens` of all ranks."""

    loss: float = 0.0
    clipped: float = 0.0
    tokens: int = 0


class CriticTrainer:
    """Trains the value network, data-parallel with the other ranks."""

    def __init__(
        self, network: Network, ppo: Ppo, seed: int, steps: int, ranks: Ranks = SINGLE, backend: BackendFactory = plain,
        training: Training = PLAIN_TRAINING,
    ) -> None:  # fmt: skip
        """`steps`: PPO steps of the run, for the learning-rate schedule. `training`: checkpointing and packing of passes."""
        self.ranks = ranks
        self.network, self.dtype = network, next(network.parameters()).dtype
        self.ppo = ppo
        self.seed = seed
        prepare_for_training(network, training)
        self.training = training
        rates = critic_rates(ppo, steps, *size_and_adapters(network))
        self.optimizer = backend(network, rates, ppo.weight_decay, ppo.max_grad_norm, ranks)
        self.budget = PassBudget(ppo.micro_batch_tokens, isinstance(self.optimizer, Optimizer), "critic")
        self.writer = Writer()
        self._early: list[Tensor] = []  # gradients of answers trained before the batch was complete
        self._early_sums = ValueSums()

    def update(
        self, tokens: list[NDArray[np.int64]], update: CriticUpdate, retained: RetainedForward | None = None
    ) -> dict[str, float]:
        """All epochs and mini-batches of one PPO step; returns `critic/vf_*`, `critic/grad_norm` and `critic/lr`.

        `retained`: the forward pass over the same rows if it was computed already; requires one optimizer step per batch.

        Raises:
            NonFiniteError: the loss or its gradient is NaN or infinite.
        """
        sums = ValueSums()
        norms = [
            self.optimizer.apply(update.step, "critic") for _ in self._gradients(tokens, update, retained, sums)
        ]  # fmt: skip
        return self._metrics(sums, update.step, norms)

    def stepwise(
        self, tokens: list[NDArray[np.int64]], update: CriticUpdate, retained: RetainedForward | None = None
    ) -> Stepwise:
        """Like `update`, but pauses before each optimizer step."""
        sums = ValueSums()
        gradients = self._gradients(tokens, update, retained, sums)
        return Stepwise(self.optimizer, gradients, partial(self._metrics, sums, update.step), update.step, "critic")

    def _gradients(
        self, tokens: list[NDArray[np.int64]], update: CriticUpdate, retained: RetainedForward | None, sums: ValueSums
    ) -> Generator[None]:  # fmt: skip
        """Yield after the gradients of each optimizer step; the caller must take the step before resuming."""
        row_at = {place: row for row, place in enumerate(update.places)}
        for epoch in range(self.ppo.epochs):
            for places in mini_batch_rows(update.batch, self.ppo.mini_batches, self.seed, update.step, epoch):
                rows = [row_at[place] for place in places if place in row_at]
                mine = sum(len(update.returns[r]) for r in rows) + self._early_sums.tokens
                total = int(self.ranks.total([mine])[0])
                with self.ranks.raise_on_all(NonFiniteError):
                    add = partial(self._add_gradients, tokens, update, rows, total, retained)
                    loss, clipped = self.budget.run("the critic's update", add)
                    self.optimizer.pad_passes(_shortest_pass)
                self._add_early(total, sums)
                sums.loss, sums.clipped, sums.tokens = sums.loss + loss, sums.clipped + clipped, sums.tokens + total
                yield

    def train_early(self, update: CriticUpdate, retained: RetainedForward) -> None:
        """Compute gradients of answers before the batch is complete; the next `update` includes them.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
        """
        assert isinstance(self.optimizer, Optimizer)  # enforced by spec validation
        loss, clipped = self._accumulate(update, list(range(len(update.returns))), retained, 1)
        gradients, sums = self.optimizer.take_gradients(), self._early_sums
        self._early = [a + b for a, b in zip(self._early, gradients, strict=True)] if self._early else gradients
        sums.loss, sums.clipped = sums.loss + loss, sums.clipped + clipped
        sums.tokens += sum(len(returns) for returns in update.returns)

    def _add_early(self, total: int, sums: ValueSums) -> None:
        """Add the gradients of `train_early` to those of an optimizer step over `total` tokens."""
        if not self._early:
            return
        assert isinstance(self.optimizer, Optimizer)
        self.optimizer.add_gradients([gradient / total for gradient in self._early])
        sums.loss, sums.clipped = sums.loss + self._early_sums.loss, sums.clipped + self._early_sums.clipped
        self._early, self._early_sums = [], ValueSums()

    def _metrics(self, sums: ValueSums, step: int, norms: list[float]) -> dict[str, float]:
        loss, clipped = self.ranks.total([sums.loss, sums.clipped])
        return {
            "critic/vf_loss": loss / sums.tokens,
            "critic/vf_clipfrac": clipped / sums.tokens,
            "critic/grad_norm": float(np.mean(norms)),
            "critic/lr": self.optimizer.rates.at(step),
        }

    def _add_gradients(
        self, tokens: list[NDArray[np.int64]], update: CriticUpdate, rows: list[int], total: int, retained: RetainedForward | None
    ) -> tuple[float, float]:
        """See `_accumulate`. Releases the retained forward pass when out of memory."""
        forward = retained
        if forward is None or not forward.passes:
            forward = self.forward([tokens[r] for r in rows], [update.prompt_lengths[r] for r in rows], 0)
        try:
            return self._accumulate(update, rows, forward, total)
        except torch.OutOfMemoryError:
            forward.release()
            raise

    def _accumulate(self, update: CriticUpdate, rows: list[int], forward: RetainedForward, total: int) -> tuple[float, float]:
        """Accumulate gradients of a mini-batch, divided by `total` tokens; returns the summed loss and clipped tokens."""
        self.optimizer.begin(forward.passes)
        metrics = DeferredMetrics()
        for group, (values,) in forward.groups():
            returns, old = (
                to_device(torch.from_numpy(np.concatenate([column[rows[i]] for i in group])), values.device).to(values)
                for column in (update.returns, update.old_values)
            )
            self.backward(values, old, returns, total, metrics)
        return self.read_sums(metrics, update.step)

    def forward(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], kept: int | None = None) -> RetainedForward:
        """Values of the response tokens; retains graphs up to `kept` tokens (default: as configured)."""

        def compute(rows: list[int]) -> tuple[Tensor]:
            self.budget.alive()
            chosen = [tokens[r] for r in rows], [prompt_lengths[r] for r in rows]
            return self.optimizer.forward(partial(_values, rows=chosen, packs=self.training.packs), self.network)

        lengths = [len(ids) for ids in tokens]
        sizes = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]

        def retain() -> RetainedForward:
            budget = self.budget.tokens
            most = budget * self.training.retained_passes if self.optimizer.holds_graphs else 0
            most = most if kept is None else kept
            reads = partial(self.optimizer.reads, shortest=_shortest_pass)
            return RetainedForward(compute, lengths, sizes, budget, most, pass_costs(self.network), self.training.packs, reads)

        return self.budget.run("the critic's forward pass", retain)

    def backward(self, values: Tensor, old: Tensor, returns: Tensor, total: int, metrics: DeferredMetrics) -> None:
        """Add the gradient of the summed value loss ÷ `total`; records the loss and clipped tokens in `metrics`."""
        self.budget.alive()
        losses, clipped = value_loss(values, old, returns, self.ppo.value_clip_range)
        loss = losses.sum()
        self.optimizer.backward(loss / total)
        metrics.record(loss, clipped.sum())

    def read_sums(self, metrics: DeferredMetrics, step: int) -> tuple[float, float]:
        """Summed loss and clipped tokens recorded by `backward` in PPO step `step`.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
        """
        loss_sum = clipped_sum = 0.0
        for loss, clipped in metrics.read():
            if not math.isfinite(loss):
                self.optimizer.fault(f"the value loss is {loss} at step {step + 1}; lower ppo.critic_learning_rate")
            loss_sum, clipped_sum = loss_sum + loss, clipped_sum + clipped
        return loss_sum, clipped_sum

    def save(self, folder: str) -> None:
        """Write weights and optimizer state into `folder`.

        Every rank must call it; the first one writes, and every rank the shards that it has.
        """
        # FSDP2 has the weights in float32 where the run has 16 bits; its masters are the same tensors.
        weights = self.writer.copy(trained_weights(self.network), self.dtype)
        state = self.writer.copy(self.optimizer.state())
        self.writer.add(partial(save_tensors, weights, Path(folder) / WEIGHTS, self.ranks))
        self.writer.add(partial(save_tensors, state, Path(folder) / MOMENTS, self.ranks))

    @property
    def saves_bytes(self) -> int:
        """Approximate size of what `save` writes."""
        return tensor_bytes(self.optimizer.parameters) + self.optimizer.saves_bytes

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        load_trained_weights(self.network, load_tensors(folder / WEIGHTS, self.network.state_dict(keep_vars=True)))
        self.optimizer.load_state(load_tensors(folder / MOMENTS, self.optimizer.shards))


def _shortest_pass(network: Network) -> tuple[Tensor]:
    """The pass that a rank makes where other ranks have more rows."""
    return _values(network, ONE_TOKEN, False)


def _values(network: Network, rows: tuple[list[NDArray[np.int64]], list[int]], packs: bool) -> tuple[Tensor]:
    """Values [M] of the response tokens; `rows`: tokens and prompt lengths."""
    return (precise(network.scalar(response_states(network, *rows, packs))),)
