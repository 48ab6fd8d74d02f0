"""FSDP2 as a `TrainingBackend`: weights, gradients and moments are sharded, in float32 or wider.

The network is sharded in place. Where a decoder needs whole weights, it has a copy of its own (`ActorTrainer.hand_over`).

Each rank saves its shards (docs/decisions/0009-checkpoints-in-shards.md).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.models.sharded_weights import full, shard_like
from oppo_core.training.lr_schedule import Rates
from oppo_core.training.optimizer import BETAS, MASTER, nonfinite_error
from oppo_core.training.protocol import Outputs
from oppo_core.training.sharded_base import EqualizedPasses, trainable_parameters
from oppo_core.training.sharded_module import ShardedModule

MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpBackend(EqualizedPasses):
    """One role's network, sharded, and its AdamW."""

    def __init__(self, network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks) -> None:
        super().__init__(network, ranks)
        self.rates, self._max_norm = rates, max_norm
        self.sharded = ShardedModule(network, ranks, trained=True)
        self.parameters = trainable_parameters(network)  # this rank's shards
        fused = self.parameters[0].is_cuda or None
        self._adamw = torch.optim.AdamW(
            self.parameters, lr=rates.peak, betas=BETAS, weight_decay=weight_decay, fused=fused
        )  # fmt: skip
        self._has_masters = self.parameters[0].dtype != self.sharded.dtype

    @property
    def holds_graphs(self) -> bool:
        """False: a block's weights are freed after its forward pass and gathered for one backward pass."""
        return False

    @property
    def saves_bytes(self) -> int:
        """Two moments a parameter, and a float32 master copy of 16-bit weights."""
        return sum(p.numel() * p.itemsize * (3 if self._has_masters else 2) for p in self.parameters)

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        return self.sharded.run(compute)

    def reads(self, passes: int, shortest: Callable[[Network], Any]) -> AbstractContextManager[None]:
        return self.sharded.reads(passes, shortest)

    def begin(self, passes: int) -> None:
        """Collective: the number of passes becomes the maximum over the ranks."""
        self.count(passes)
        self._adamw.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Gradients are summed over the ranks, not averaged."""
        with self.ranks.rank_errors("a backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
        self._due -= 1

    def apply(self, step: int, role: str) -> float:
        self.raise_faults()
        with self.ranks.rank_errors("the optimizer's step"):
            norm = float(full(nn.utils.clip_grad_norm_(self.parameters, self._max_norm)))
        if not norm < float("inf"):
            raise nonfinite_error(role, norm, step)
        for group in self._adamw.param_groups:
            group["lr"] = self.rates.at(step)
        self._adamw.step()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Under the names of `Optimizer`; all but the step counts are this rank's shards."""
        state: dict[str, Tensor] = {}
        for number, part in enumerate(self.parameters):
            entry = self._adamw.state.get(part, {})
            if self._has_masters:
                state[f"{number}.{MASTER}"] = part.detach()
            state |= {f"{number}.{name}": torch.as_tensor(entry[name]) for name in (*MOMENTS, "step") if name in entry}
        return state

    @property
    def shards(self) -> dict[str, Tensor]:
        return {f"{number}.{name}": part for number, part in enumerate(self.parameters) for name in (MASTER, *MOMENTS)}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self._adamw.state.clear()
        for number, part in enumerate(self.parameters):
            if f"{number}.{MASTER}" in tensors:
                part.copy_(shard_like(tensors[f"{number}.{MASTER}"], part))
            if f"{number}.step" not in tensors:
                continue
            moments = {name: shard_like(tensors[f"{number}.{name}"], part) for name in MOMENTS}
            # AdamW's fused kernel expects the step count beside the weights, the other one in main memory.
            device = part.device if part.is_cuda else torch.device("cpu")
            self._adamw.state[part] = {"step": tensors[f"{number}.step"].to(device, copy=True), **moments}
