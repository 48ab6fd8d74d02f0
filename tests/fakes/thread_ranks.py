"""Ranks as threads of one process: the collectives of `process_group.Ranks` without a connection, for many short runs.

`tests/engine/distributed/test_process_group.py` holds them to the same expectations as gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from oppo_core.distributed.process_group import ProcessGroup, Ranks


class SharedValues:
    """Values exchanged between the ranks: each sets one and gets all."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.values: list[Any] = [None] * world

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class ThreadRanks(Ranks):
    """One rank of `world`."""

    def __init__(self, rank: int, world: int, shared: SharedValues) -> None:
        self.rank, self.world, self.first = rank, world, rank == 0
        self._shared = shared

    def _all(self, value: Any) -> list[Any]:
        return self._shared.exchange(self.rank, value)

    def total(self, values: Iterable[float]) -> list[float]:
        return [sum(column) for column in zip(*self._all([float(value) for value in values]), strict=True)]

    def largest(self, values: Iterable[float]) -> list[float]:
        return [max(column) for column in zip(*self._all(list(values)), strict=True)]

    def total_counts(self, counts: list[int]) -> list[int]:
        return [sum(column) for column in zip(*self._all(counts), strict=True)]

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        return [sent[self.rank] for sent in self._all(payloads)]

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._all(payload)

    def any(self, flag: bool) -> bool:
        return any(self._all(flag))

    def all_reduce(self, tensors: list[Tensor]) -> None:
        for tensor, *others in zip(tensors, *self._all([tensor.clone() for tensor in tensors]), strict=True):
            tensor.copy_(sum(others))

    raise_on_all = ProcessGroup.raise_on_all  # it needs `all_gather` only


def on_threads(world: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """`work` on each of `world` ranks; their results by rank. Raises the error of a rank that fails."""
    shared, results, errors = SharedValues(world), [None] * world, list[BaseException]()

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, world, shared))
        except threading.BrokenBarrierError:
            pass  # another rank failed
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
