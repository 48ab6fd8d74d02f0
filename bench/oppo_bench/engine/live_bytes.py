"""Counts the bytes of live tensors: results of every operation within a context, until they are freed.

Temporary memory within one operation is not counted. On a GPU torch's allocator measures it.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager; `peak` is the most bytes that tensors created within it held at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count its results."""
        results = operation(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return results

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, storage._cdata, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def most_weights(tracker: Any) -> int:
    """Most bytes of weights at one time, shards and gathered ones, that torch's `FSDPMemTracker` has counted on a CPU."""
    from torch.distributed._tools.fsdp2_mem_tracker import _FSDPRefType

    kinds = (_FSDPRefType.SHARDED_PARAM, _FSDPRefType.UNSHARDED_PARAM)
    states = (states for stats in tracker.memory_tracking.values() for states in stats.snapshots.values())
    snapshots = (snapshot for each in states for snapshot in each)
    return max(
        int(sum(sizes[kind] for kind in kinds)) for snapshot in snapshots for at, sizes in snapshot.items() if at.type == "cpu"
    )
