"""Weights that are sharded over the ranks (`DTensor`): copied and loaded one at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from oppo_core.models.protocol import Network


def full(weight: Tensor) -> Tensor:
    """The full tensor of a weight. Collective if it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """`value`, which every rank has in full or in the same shards, with the dtype, device and shards of `like`."""
    value = value.to(device=like.device, dtype=like.dtype)
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    return cast(Tensor, distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None))


@torch.no_grad()
def copy_trained(source: Iterable[Tensor], target: Iterable[Tensor]) -> int:
    """Copy the weights that are trained, one at a time; those of either side may be sharded. Collective if the source is.

    Returns their size in bytes, in the target's dtype, in which sharded ones are gathered.
    """
    size = 0
    for given, own in zip(source, target, strict=True):
        if given.requires_grad:
            value = full(given.to(own.dtype))
            own.copy_(shard_like(value, own))
            size += value.nbytes
    return size


@torch.no_grad()
def load_weights(network: Network, weights: dict[str, Tensor]) -> None:
    """Load weights by name, every one of the network; a sharded network takes its shards of them."""
    own = network.state_dict(keep_vars=True)
    if not any(isinstance(weight, DTensor) for weight in own.values()):
        network.load_state_dict(weights)
        return
    for name, weight in own.items():
        weight.copy_(shard_like(weights[name], weight))
