"""One set of frozen weights for two networks: the reference of a run that trains adapters is its actor without them.

The adapters stand beside the actor's weights, which nobody writes to. So nothing is switched off and on again: both networks may
be read at the same time, by two threads of a process or by two processes.
"""

from __future__ import annotations

import copy
import logging
import shutil
from itertools import chain
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from oppo_contract.machine import mib
from oppo_core.models.protocol import Network

# Where Linux keeps what processes share; a container often has little of it, and what does not fit ends the process.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
LOG = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=nn.Module)


def over_same_weights(network: Kind) -> Kind:
    """A second tree of modules over the very same parameters and buffers: no number is copied."""
    return copy.deepcopy(network, {id(tensor): tensor for tensor in chain(network.parameters(), network.buffers())})


def seen_by_others(network: Network, ranks_here: int = 1) -> dict[str, Tensor] | None:
    """Move a network's weights, in place, to where other processes can see them; by name.

    None, and a word in the log, where the system has no room for that: for each of `ranks_here`, which do so at the same time.
    """
    weights = network.state_dict()
    size = sum({weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights.values()}.values())
    if (free := short_of_shared_memory(size, ranks_here)) is not None:
        LOG.warning(
            "the reference is loaded a second time: to share the actor's weights with the scorers' process %s of shared memory"
            " are needed, and %s has %s for each rank; give the container more (docker run --shm-size)",
            mib(size), SHARED_MEMORY, mib(free),
        )  # fmt: skip
        return None
    for weight in weights.values():
        weight.share_memory_()  # type: ignore[no-untyped-call]
    return weights


def short_of_shared_memory(size: int, ranks_here: int = 1) -> int | None:
    """The bytes that are there for each of `ranks_here` where these are fewer than `size`; None where there is room."""
    if not SHARED_MEMORY.exists():
        return None
    free = shutil.disk_usage(SHARED_MEMORY).free // ranks_here
    return free if free < size else None


def take_shared(network: Network, weights: dict[str, Tensor]) -> None:
    """From now on `network` has the weights that another process has put where both see them."""
    for name, weight in network.state_dict(keep_vars=True).items():
        weight.data = weights[name]
