"""One set of frozen weights for two networks: the reference of a run with adapters is its actor without them.

Adapters are separate modules beside the actor's frozen weights. So both networks can run at the same time, in two threads or two
processes.
"""

from __future__ import annotations

import copy
import logging
import shutil
from itertools import chain
from pathlib import Path
from typing import TypeVar, cast

from torch import Tensor, nn

from oppo_contract.machine import mib
from oppo_core.models.protocol import Network

# Linux's shared memory; a container often has little of it, and exceeding it kills the process.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
LOG = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=Network)


def copy_sharing_weights(network: Kind) -> Kind:
    """A second tree of modules over the same parameters and buffers, without copies."""
    module = cast(nn.Module, network)
    return copy.deepcopy(network, {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())})


def move_to_shared_memory(network: Network, ranks_here: int = 1) -> dict[str, Tensor] | None:
    """Move a network's weights in place to shared memory; returns them by name.

    None, with a warning in the log, if there is not enough for all of `ranks_here`, which do so at the same time.
    """
    weights = network.state_dict()
    size = sum({weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights.values()}.values())
    if (free := shared_memory_shortage(size, ranks_here)) is not None:
        LOG.warning(
            "the reference is loaded a second time: to share the actor's weights with the scorers' process %s of shared memory"
            " are needed, and %s has %s for each rank; give the container more (docker run --shm-size)",
            mib(size), SHARED_MEMORY, mib(free),
        )  # fmt: skip
        return None
    for weight in weights.values():
        weight.share_memory_()  # type: ignore[no-untyped-call]
    return weights


def shared_memory_shortage(size: int, ranks_here: int = 1) -> int | None:
    """Free bytes for each of `ranks_here` if these are fewer than `size`; otherwise None."""
    if not SHARED_MEMORY.exists():
        return None
    free = shutil.disk_usage(SHARED_MEMORY).free // ranks_here
    return free if free < size else None


def shared_folder(size: int) -> Path | None:
    """Where to put a file of `size` bytes that another process reads: shared memory, or None (temporary folder) if too small."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() and shared_memory_shortage(size) is None else None


def use_shared_weights(network: Network, weights: dict[str, Tensor]) -> None:
    """Make `network` use weights in shared memory that another process owns."""
    for name, weight in network.state_dict(keep_vars=True).items():
        weight.data = weights[name]
