"""One rank of torch's fake process group, which allocates as a real one does and moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from oppo_core.distributed.process_group import Ranks


class FakeRanks(Ranks):
    """A rank that receives its own payload from all others."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.first = rank, world, rank == 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload] * self.world


@contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[FakeRanks]:
    """The rank, with torch's default process group."""
    if dist.is_initialized():  # of a run with sharded roles in this process, which has ended
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield FakeRanks(rank, world)
    finally:
        dist.destroy_process_group()
