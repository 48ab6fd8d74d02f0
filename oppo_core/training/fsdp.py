"""FSDP2 (`fully_shard`) as a `TrainingBackend`: trainable weights, gradients and moments are sharded, in float32 or wider.

The decoder and the other roles use a full copy of the network, which is filled after each step, one parameter at a time. FSDP
communicates in every pass, so all ranks make the same number of passes (`EqualizedPasses`).

Checkpoints have the format of all backends (docs/decisions/0004-checkpoints-of-sharded-training-are-ours.md). Not tested on a GPU
with NCCL yet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.training.lr_schedule import Rates
from oppo_core.training.optimizer import BETAS, MASTER, nonfinite_error
from oppo_core.training.process_group import join_default_group
from oppo_core.training.protocol import Outputs
from oppo_core.training.sharded_base import EqualizedPasses, PassThroughModule, is_low_precision, trainable_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpBackend(EqualizedPasses):
    """A sharded copy of one role's network, and its AdamW."""

    def __init__(self, network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks) -> None:
        super().__init__(network, ranks)
        self.rates, self._max_norm = rates, max_norm
        self.parameters = trainable_parameters(network)
        device = self.parameters[0].device
        join_default_group(device, ranks)
        # Built from the group: `init_device_mesh` would choose devices itself and expect a rank on each device of the node.
        world = dist.group.WORLD
        assert world is not None
        self._mesh = DeviceMesh.from_group(world, device.type)
        self._module = _shard(network, self._mesh)
        self.parts = trainable_parameters(cast(Network, self._module))  # this rank's shards, in the same order
        self._adamw = torch.optim.AdamW(self.parts, lr=rates.peak, betas=BETAS, weight_decay=weight_decay)

    @property
    def holds_graphs(self) -> bool:
        """False: a block's weights are freed after its forward pass and gathered for one backward pass."""
        return False

    @property
    def saves_bytes(self) -> int:
        """Two moments a parameter, and a float32 master copy of 16-bit weights."""
        return sum(p.numel() * (12 if is_low_precision(p) else 2 * p.itemsize) for p in self.parameters)

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """Without gradients the full network is used, so no collective runs."""
        if not torch.is_grad_enabled():
            return compute(self._whole)
        # FSDP's backward hook sits on the output tensors; a view of an output would bypass it.
        with self.ranks.rank_errors("a forward pass"):
            return cast(Outputs, self._module(lambda within: tuple(output.clone() for output in compute(within))))

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
            norm = float(_full(nn.utils.clip_grad_norm_(self.parts, self._max_norm)))
        if not norm < float("inf"):
            raise nonfinite_error(role, norm, step)
        for group in self._adamw.param_groups:
            group["lr"] = self.rates.at(step)
        self._adamw.step()
        self._update_full_network()
        return norm

    @torch.no_grad()
    def _update_full_network(self) -> None:
        """Copy the trained weights into the network that the other roles use."""
        with self.ranks.rank_errors("gathering the weights"):
            for whole, part in zip(self.parameters, self.parts, strict=True):
                whole.copy_(_full(part))

    def state(self) -> dict[str, Tensor]:
        """Gathered one parameter at a time; only rank 0 keeps the result."""
        state: dict[str, Tensor] = {}
        for number, (whole, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            entry = self._adamw.state.get(part, {})
            parts = {MASTER: part.detach()} if is_low_precision(whole) else {}
            parts |= {name: entry[name] for name in MOMENTS if name in entry}
            for name, value in parts.items():
                with self.ranks.rank_errors("gathering the optimizer's state"):
                    gathered = _full(value)
                if self.ranks.first:
                    state[f"{number}.{name}"] = gathered.to("cpu", copy=True)
            if entry and self.ranks.first:
                state[f"{number}.step"] = torch.as_tensor(entry["step"]).clone()
        return state

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        self._adamw.state.clear()
        for number, (whole, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            part.copy_(self._shard_of(tensors.get(f"{number}.{MASTER}", whole.detach()), part))
            if f"{number}.step" not in tensors:
                continue
            moments = {name: self._shard_of(tensors[f"{number}.{name}"], part) for name in MOMENTS}
            self._adamw.state[part] = {"step": tensors[f"{number}.step"].clone(), **moments}

    def _shard_of(self, value: Tensor, part: Parameter) -> DTensor:
        """This rank's shard of a tensor that every rank holds in full."""
        assert isinstance(part, DTensor)
        value = value.to(device=part.device, dtype=part.dtype)
        return distribute_tensor(value, self._mesh, part.placements, src_data_rank=None)


def _shard(network: Network, mesh: DeviceMesh) -> PassThroughModule:
    """A copy of the network sharded block by block, then the remaining parameters; in float32 or wider."""
    copied = copy.deepcopy(network)
    short = is_low_precision(next(network.parameters()))
    if short:
        cast(nn.Module, copied).float()
    policy = MixedPrecisionPolicy(param_dtype=next(network.parameters()).dtype, reduce_dtype=torch.float32) if short else None
    module = PassThroughModule(copied)
    for unit in (*_blocks(module), module):
        fully_shard(unit, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        assert isinstance(unit, FSDPModule)
        # Losses are divided by the tokens of all ranks already, so gradients are summed; gloo supports only sums.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return module


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The modules in the outermost `nn.ModuleList`s: the transformer blocks."""
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += list(child) if isinstance(child, nn.ModuleList) else _blocks(child)
    return blocks


def _full(tensor: Tensor) -> Tensor:
    """The full tensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
