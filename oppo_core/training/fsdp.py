"""torch's own sharding (FSDP2, `fully_shard`) as a `Stepper`: each rank keeps a part of the weights that are trained, of their
gradients and of the moments, all in float32 at least.

Everybody else, the decoder above all, sees a whole network, which is filled after each step, a parameter at a time. FSDP meets
the other ranks in every pass. So all make equally many: a rank that has fewer repeats one of its own with a loss of zero. And
none may stop on its own account: a loss that is not finite is remembered, and all end before the step.

Checkpoints are those of all backends (docs/decisions/0004-checkpoints-of-sharded-training-are-ours.md). Not yet tried on a GPU,
over NCCL.
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
from oppo_core.ppo.lr_schedule import Rates
from oppo_core.ppo.optimizer import BETAS, MASTER, not_finite
from oppo_core.training.backends import Outputs
from oppo_core.training.process_group import join_default_group
from oppo_core.training.sharded_base import EvenPasses, Through, is_short, trained_in

MOMENTS = ("exp_avg", "exp_avg_sq")


class FsdpStepper(EvenPasses):
    """One role's network, a copy of it cut up among the ranks."""

    def __init__(self, network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks) -> None:
        super().__init__(network, ranks)
        self.rates, self._max_norm = rates, max_norm
        self.parameters = trained_in(network)
        device = self.parameters[0].device
        join_default_group(device, ranks)
        # From the group: a mesh that is made otherwise takes devices by itself, and expects ranks on all that a node shows.
        everybody = dist.group.WORLD
        assert everybody is not None
        self._mesh = DeviceMesh.from_group(everybody, device.type)
        self._module = _cut_up(network, self._mesh)
        self.parts = trained_in(cast(Network, self._module))  # this rank's, in the same order
        self._adamw = torch.optim.AdamW(self.parts, lr=rates.peak, betas=BETAS, weight_decay=weight_decay)

    @property
    def holds_graphs(self) -> bool:
        """See `Stepper.holds_graphs`: a block's weights are let go of after its pass, and gathered for one backward."""
        return False

    @property
    def saves_bytes(self) -> int:
        """See `Stepper.saves_bytes`: two moments, and short weights precisely."""
        return sum(p.numel() * (12 if is_short(p) else 2 * p.itemsize) for p in self.parameters)

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """See `Stepper.forward`. Without gradients nobody is met: the whole network does."""
        if not torch.is_grad_enabled():
            return compute(self._whole)
        self._latest = compute
        # FSDP gathers weights anew when gradients come to its output, which it would not see through a view.
        with self.ranks.reaching("a forward pass"):
            return cast(Outputs, self._module(lambda within: tuple(output.clone() for output in compute(within))))

    def begin(self, passes: int) -> None:
        """See `Stepper.begin`. Takes the most that a rank has."""
        self.count(passes)
        self._adamw.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """See `Stepper.backward`: the ranks' gradients are added up, not averaged."""
        with self.ranks.reaching("a backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]
        self._due -= 1

    def apply(self, step: int, role: str) -> float:
        """See `Stepper.apply`."""
        self.refuse_faults()
        with self.ranks.reaching("the optimizer's step"):
            norm = float(_full(nn.utils.clip_grad_norm_(self.parts, self._max_norm)))
        if not norm < float("inf"):
            raise not_finite(role, norm, step)
        for group in self._adamw.param_groups:
            group["lr"] = self.rates.at(step)
        self._adamw.step()
        self._hand_over()
        return norm

    @torch.no_grad()
    def _hand_over(self) -> None:
        """The weights that are trained into the network that the other roles see."""
        with self.ranks.reaching("gathering the weights"):
            for whole, part in zip(self.parameters, self.parts, strict=True):
                whole.copy_(_full(part))

    def state(self) -> dict[str, Tensor]:
        """See `Stepper.state`: gathered one parameter at a time, and kept by the first rank."""
        kept: dict[str, Tensor] = {}
        for number, (whole, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            entry = self._adamw.state.get(part, {})
            parts = {MASTER: part.detach()} if is_short(whole) else {}
            parts |= {name: entry[name] for name in MOMENTS if name in entry}
            for name, value in parts.items():
                with self.ranks.reaching("gathering the optimizer's state"):
                    found = _full(value)
                if self.ranks.first:
                    kept[f"{number}.{name}"] = found.to("cpu", copy=True)
            if entry and self.ranks.first:
                kept[f"{number}.step"] = torch.as_tensor(entry["step"]).clone()
        return kept

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """See `Stepper.load_state`."""
        self._adamw.state.clear()
        for number, (whole, part) in enumerate(zip(self.parameters, self.parts, strict=True)):
            part.copy_(self._cut(tensors.get(f"{number}.{MASTER}", whole.detach()), part))
            if f"{number}.step" not in tensors:
                continue
            moments = {name: self._cut(tensors[f"{number}.{name}"], part) for name in MOMENTS}
            self._adamw.state[part] = {"step": tensors[f"{number}.step"].clone(), **moments}

    def _cut(self, value: Tensor, part: Parameter) -> DTensor:
        """This rank's part of a tensor that every rank has whole."""
        assert isinstance(part, DTensor)
        value = value.to(device=part.device, dtype=part.dtype)
        return distribute_tensor(value, self._mesh, part.placements, src_data_rank=None)


def _cut_up(network: Network, mesh: DeviceMesh) -> Through:
    """A copy of the network for training, block by block and then what is left, in parts of float32 at least."""
    copied = copy.deepcopy(network)
    short = is_short(next(network.parameters()))
    if short:
        cast(nn.Module, copied).float()
    policy = MixedPrecisionPolicy(param_dtype=next(network.parameters()).dtype, reduce_dtype=torch.float32) if short else None
    module = Through(copied)
    for unit in (*_blocks(module), module):
        fully_shard(unit, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
        assert isinstance(unit, FSDPModule)
        # Losses are divided by the tokens of all ranks already, so gradients are summed; gloo knows no other way either.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return module


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of the network's outermost lists."""
    found: list[nn.Module] = []
    for child in module.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _blocks(child)
    return found


def _full(tensor: Tensor) -> Tensor:
    """All ranks' parts together. All ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
