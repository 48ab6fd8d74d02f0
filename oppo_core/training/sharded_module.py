"""A network whose weights are sharded over the ranks by FSDP2 (`fully_shard`; arXiv 2304.11277).

Each rank keeps its part of every weight. A pass gathers one unit after another and frees it again: the embedding where it is not
tied to the head, and each transformer block; and for the whole pass the rest, which contains the head. So every pass is
collective, with or without gradients, and all ranks make the same passes in the same order. Over NCCL it has run
on one rank only; several ranks have run over gloo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.training.process_group import join_default_group
from oppo_core.training.protocol import Outputs
from oppo_core.training.sharded_base import PassThroughModule, is_low_precision


class ShardedModule:
    """A network, sharded in place, and the passes over it."""

    def __init__(self, network: Network, ranks: Ranks, trained: bool) -> None:
        """`trained`: its shards become float32 where the network has 16 bits; passes compute in the network's dtype.

        Reads the weights of a network that is still without (`huggingface_io.build_on_meta`): this rank's shards.
        """
        first, pending = next(network.parameters()), getattr(network, "pending", None)
        self.network, self.ranks, self.dtype = network, ranks, first.dtype
        device = first.device if pending is None else pending.device
        join_default_group(device, ranks)
        # Built from the group: `init_device_mesh` would choose devices itself and expect a rank on each device of the node.
        world = dist.group.WORLD
        assert world is not None
        low_precision = trained and is_low_precision(first)
        self._module = _shard(network, DeviceMesh.from_group(world, device.type), low_precision)
        if pending is not None:
            pending.read(network)
        if low_precision:
            self._module.float()

    def run(self, compute: Callable[[Network], Outputs]) -> Outputs:
        """One pass, with gradients if they are enabled."""
        with self.ranks.rank_errors("a forward pass"):
            if torch.is_grad_enabled():
                # FSDP's backward hook sits on the output tensors; a view of an output would bypass it.
                return cast(Outputs, self._module(lambda within: tuple(output.clone() for output in compute(within))))
            outputs = cast(Outputs, self._module(compute))
            cast(FSDPModule, self._module).reset_iter_state()  # frees what FSDP keeps until a backward pass
            return outputs

    @contextmanager
    def reads(self, passes: int, shortest: Callable[[Network], Any]) -> Iterator[None]:
        """Context manager around `passes` passes without gradients: adds those, of `shortest`, that other ranks have more."""
        most = int(self.ranks.largest([passes])[0])
        yield
        with torch.no_grad():
            for _ in range(most - passes):
                self.run(shortest)


def _shard(network: Network, mesh: DeviceMesh, low_precision: bool) -> PassThroughModule:
    """`low_precision`: weights of 16 bits are to be trained, in float32."""
    dtype = next(network.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if low_precision else MixedPrecisionPolicy()
    module = PassThroughModule(network)
    embeddings = _embeddings(module)
    for unit in (*embeddings, *_blocks(module), module):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        assert isinstance(unit, FSDPModule)
        # Losses are divided by the tokens of all ranks already, so gradients are summed; gloo supports only sums.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    for embedding in embeddings:
        cast(FSDPModule, embedding).set_unshard_in_backward(False)  # its gradient does not depend on its weights
    return module


def _embeddings(module: nn.Module) -> list[nn.Module]:
    """The token embedding of a Hugging Face model, unless the head has the same weight."""
    uses = Counter(id(weight) for _, weight in module.named_parameters(remove_duplicate=False))
    backbone: Any = getattr(cast(PassThroughModule, module).network, "backbone", None)
    embedding = backbone.get_input_embeddings() if backbone is not None else None
    return [embedding] if isinstance(embedding, nn.Embedding) and uses[id(embedding.weight)] == 1 else []


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The modules in the outermost `nn.ModuleList`s: the transformer blocks."""
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += list(child) if isinstance(child, nn.ModuleList) else _blocks(child)
    return blocks
