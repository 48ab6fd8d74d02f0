"""The process's one default group of torch, for backends that meet the other ranks in it. Both roles of a process share it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from oppo_core.distributed.process_group import Ranks


def join_default_group(device: torch.device, ranks: Ranks) -> str:
    """Join it, unless that was done before; returns what carries it: nccl or gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        longest = timedelta(seconds=ranks.meeting.longest_wait_s) if ranks.meeting is not None else None
        dist.init_process_group(backend, store=ranks.store("sharded"), rank=ranks.rank, world_size=ranks.world, timeout=longest)
    return backend
