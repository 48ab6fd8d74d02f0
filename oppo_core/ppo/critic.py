"""The critic's side of a PPO step. It may run in another process than the actor's."""

from __future__ import annotations

import math
from collections.abc import Container, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from oppo_contract.sections.training import PLAIN_TRAINING
from oppo_contract.spec import Ppo, Training
from oppo_core.distributed.process_group import ALONE, Ranks
from oppo_core.models.activation_checkpointing import prepare
from oppo_core.models.adapters import take_trained, trained_weights
from oppo_core.models.host_device import to_device
from oppo_core.models.model_io import save_weights
from oppo_core.models.protocol import Network
from oppo_core.models.upcast import precise
from oppo_core.ppo.deferred_metrics import Figures
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import value_loss
from oppo_core.ppo.lr_schedule import critic_rates
from oppo_core.ppo.microbatching import mini_batch_rows, pass_costs, response_states
from oppo_core.ppo.oom_retry import PassBudget
from oppo_core.ppo.optimizer import NonFiniteError, Optimizer, size_of
from oppo_core.ppo.retained_forward import HeldForward
from oppo_core.ppo.stepwise import Stepwise
from oppo_core.training.backends import plain
from oppo_core.training.protocol import BackendFactory

WEIGHTS, MOMENTS = "critic.safetensors", "critic-optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class CriticUpdate:
    """Order to train on sequences that the scorers hold: returns and step-start values, an array a sequence."""

    step: int
    sequence_ids: list[int]
    prompt_lengths: list[int]
    returns: list[NDArray[np.float64]]
    old_values: list[NDArray[np.float64]]

    def without(self, sequence_ids: Container[int]) -> CriticUpdate:
        """The order for the other sequences."""
        rows = [row for row, sequence_id in enumerate(self.sequence_ids) if sequence_id not in sequence_ids]
        return replace(
            self,
            sequence_ids=[self.sequence_ids[row] for row in rows],
            prompt_lengths=[self.prompt_lengths[row] for row in rows],
            returns=[self.returns[row] for row in rows],
            old_values=[self.old_values[row] for row in rows],
        )


def critic_order(experience: Experience, step: int) -> CriticUpdate:
    """The critic's share of a step, this rank's rows without padding."""
    e, lengths = experience, experience.mask.sum(-1).tolist()
    ids = [e.sequences[row].sequence_id for row in e.own]
    returns = [e.returns[row, : lengths[row]].numpy() for row in e.own]
    values = [e.values[row, : lengths[row]].numpy() for row in e.own]
    return CriticUpdate(step, ids, [e.prompt_lengths[row] for row in e.own], returns, values)


@dataclass(slots=True)
class ValueSums:
    """Sums over the tokens of one update: `loss` and `clipped` are this rank's, `tokens` those of all ranks."""

    loss: float = 0.0
    clipped: float = 0.0
    tokens: int = 0


class CriticTrainer:
    """Trains the value network, together with the critic's trainers of the other ranks."""

    def __init__(
        self, network: Network, ppo: Ppo, seed: int, steps: int, ranks: Ranks = ALONE, backend: BackendFactory = plain,
        training: Training = PLAIN_TRAINING,
    ) -> None:  # fmt: skip
        """`steps`: of the whole run, over which the learning rate falls. `training`: what its passes keep."""
        self.ranks = ranks
        self.network = network
        self.ppo = ppo
        self.seed = seed
        prepare(network, training)
        self.packs = training.packs
        self.optimizer = backend(network, critic_rates(ppo, steps), ppo.weight_decay, ppo.max_grad_norm, ranks)
        self.budget = PassBudget(ppo.micro_batch_tokens, isinstance(self.optimizer, Optimizer), "critic")
        self._early: list[Tensor] = []  # gradients of answers that were trained before the batch was complete, and their sums
        self._early_sums = ValueSums()

    def update(self, tokens: list[NDArray[np.int64]], order: CriticUpdate, held: HeldForward | None = None) -> dict[str, float]:
        """All epochs and mini-batches of one PPO step; returns `critic/vf_*`, `critic/grad_norm` and `critic/lr`.

        `held`: the forward pass over the same rows, when there is one optimizer step and it has been computed already.

        Raises:
            NonFiniteError: the loss or its gradient is NaN or infinite.
        """
        sums = ValueSums()
        norms = [
            self.optimizer.apply(order.step, "critic") for _ in self._gradients(tokens, order, held, sums)
        ]  # fmt: skip
        return self._metrics(sums, order.step, norms)

    def stepwise(self, tokens: list[NDArray[np.int64]], order: CriticUpdate, held: HeldForward | None = None) -> Stepwise:
        """`update`, pausing before each optimizer step."""
        sums = ValueSums()
        gradients = self._gradients(tokens, order, held, sums)
        return Stepwise(self.optimizer, gradients, partial(self._metrics, sums, order.step), order.step, "critic")

    def _gradients(
        self, tokens: list[NDArray[np.int64]], order: CriticUpdate, held: HeldForward | None, sums: ValueSums
    ) -> Generator[None]:  # fmt: skip
        """The gradients of one optimizer step after the other: each is to be taken before the next one is asked for."""
        for epoch in range(self.ppo.epochs):
            for rows in mini_batch_rows(len(tokens), self.ppo.mini_batches, self.seed, order.step, epoch):
                mine = sum(len(order.returns[r]) for r in rows) + self._early_sums.tokens
                total = int(self.ranks.total([mine])[0])
                with self.ranks.agreed(NonFiniteError):
                    add = partial(self._add_gradients, tokens, order, rows, total, held)
                    loss, clipped = self.budget.shrinking("the critic's update", add)
                    self.optimizer.pad_passes()
                self._add_early(total, sums)
                sums.loss, sums.clipped, sums.tokens = sums.loss + loss, sums.clipped + clipped, sums.tokens + total
                yield

    def train_early(self, order: CriticUpdate, held: HeldForward) -> None:
        """Compute the gradients of answers before the batch is complete; the next `update` takes them along.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
        """
        assert isinstance(self.optimizer, Optimizer)  # the spec has refused others
        loss, clipped = self._accumulate(order, list(range(len(order.returns))), held, 1)
        gradients, sums = self.optimizer.take_gradients(), self._early_sums
        self._early = [a + b for a, b in zip(self._early, gradients, strict=True)] if self._early else gradients
        sums.loss, sums.clipped = sums.loss + loss, sums.clipped + clipped
        sums.tokens += sum(len(returns) for returns in order.returns)

    def _add_early(self, total: int, sums: ValueSums) -> None:
        """Add what `train_early` has computed to the gradients of an optimizer step over `total` tokens."""
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
        self, tokens: list[NDArray[np.int64]], order: CriticUpdate, rows: list[int], total: int, held: HeldForward | None
    ) -> tuple[float, float]:
        """See `_accumulate`. When memory runs out, nothing is left of the forward pass that was `held`."""
        forward = held
        if forward is None or not forward.passes:
            forward = self.hold([tokens[r] for r in rows], [order.prompt_lengths[r] for r in rows], 0)
        try:
            return self._accumulate(order, rows, forward, total)
        except torch.OutOfMemoryError:
            forward.let_go()
            raise

    def _accumulate(self, order: CriticUpdate, rows: list[int], forward: HeldForward, total: int) -> tuple[float, float]:
        """Gradients of a mini-batch's rows, divided by `total` tokens; returns their summed loss, and the clipped tokens."""
        self.optimizer.begin(forward.passes)
        figures = Figures()
        for group, (values,) in forward.groups():
            returns, old = (
                to_device(torch.from_numpy(np.concatenate([column[rows[i]] for i in group])), values.device).to(values)
                for column in (order.returns, order.old_values)
            )
            self.backward(values, old, returns, total, figures)
        return self.told(figures, order.step)

    def hold(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], kept: int | None = None) -> HeldForward:
        """Values of the response tokens; graphs are kept up to `kept` tokens (default: a micro-batch)."""

        def compute(rows: list[int]) -> tuple[Tensor]:
            self.budget.alive()
            chosen = [tokens[r] for r in rows], [prompt_lengths[r] for r in rows]
            return self.optimizer.forward(partial(_values, rows=chosen, packs=self.packs), self.network)

        lengths = [len(ids) for ids in tokens]
        sizes = [length - prompt for length, prompt in zip(lengths, prompt_lengths, strict=True)]

        def read() -> HeldForward:
            budget = self.budget.tokens
            most = (budget if self.optimizer.holds_graphs else 0) if kept is None else kept
            return HeldForward(compute, lengths, sizes, budget, most, pass_costs(self.network), self.packs)

        return self.budget.shrinking("the critic's forward pass", read)

    def backward(self, values: Tensor, old: Tensor, returns: Tensor, total: int, figures: Figures) -> None:
        """Add the gradient of the summed value loss ÷ `total`; notes the sum and the clipped tokens."""
        self.budget.alive()
        losses, clipped = value_loss(values, old, returns, self.ppo.value_clip_range)
        loss = losses.sum()
        self.optimizer.backward(loss / total)
        figures.note(loss, clipped.sum())

    def told(self, figures: Figures, step: int) -> tuple[float, float]:
        """The summed loss and the clipped tokens of what `backward` has noted in PPO step `step`.

        Raises:
            NonFiniteError: a loss is NaN or infinite.
        """
        loss_sum = clipped_sum = 0.0
        for loss, clipped in figures.read():
            if not math.isfinite(loss):
                self.optimizer.fault(f"the value loss is {loss} at step {step + 1}; lower ppo.critic_learning_rate")
            loss_sum, clipped_sum = loss_sum + loss, clipped_sum + clipped
        return loss_sum, clipped_sum

    def save(self, folder: str) -> None:
        """Write weights and optimizer into `folder`: the first rank does, they are the same on all."""
        state = self.optimizer.state()
        if not self.ranks.first:
            return
        save_weights(trained_weights(self.network), Path(folder) / WEIGHTS)
        save_weights(state, Path(folder) / MOMENTS)

    @property
    def saves_bytes(self) -> int:
        """About how much `save` writes."""
        return size_of(self.optimizer.parameters) + self.optimizer.saves_bytes

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote."""
        take_trained(self.network, load_file(folder / WEIGHTS))
        self.optimizer.load_state(load_file(folder / MOMENTS))


def _values(network: Network, rows: tuple[list[NDArray[np.int64]], list[int]], packs: bool) -> tuple[Tensor]:
    """Values [M] of the response tokens of rows: their tokens and prompt lengths."""
    return (precise(network.scalar(response_states(network, *rows, packs))),)
