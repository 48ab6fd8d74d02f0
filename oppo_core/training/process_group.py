"""torch.distributed's default process group, shared by the actor's and the critic's training backends of a process."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from oppo_core.distributed.process_group import Ranks, blocking_wait


def join_default_group(device: torch.device, ranks: Ranks) -> str:
    """Initialize the default process group once per process; returns its backend, "nccl" or "gloo".

    FSDP2 and DeepSpeed do not wait for its NCCL collectives on the host, so torch's watchdog must end the process where one
    exceeds the time limit. That was not run with a frozen rank on GPUs.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        longest = timedelta(seconds=ranks.rendezvous.timeout_s) if ranks.rendezvous is not None else None
        store = ranks.store("sharded")
        with blocking_wait(False):
            dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=longest)
    return backend
