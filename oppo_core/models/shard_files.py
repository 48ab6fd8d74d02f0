"""Shards of tensors in safetensors files, in the Hugging Face format of torch.distributed.checkpoint.

A rank writes files of its own and reads what it needs from those of any number of ranks. Nothing is pickled or communicated.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, empty

from oppo_core.distributed.process_group import Ranks

# About the size of a file: while one is written, torch has its content in memory a second time.
FILE_BYTES = 1 << 30
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # what it calls to communicate nothing


def save_shards(tensors: Mapping[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Write this rank's shards. Creates the folder."""
    numbers, size = {}, 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + size // FILE_BYTES
        size += tensor.numel() * tensor.itemsize // ranks.world
    writer, planner = _ShardWriter(folder, ranks.rank, numbers), _ShardPlanner(flatten_state_dict=False)
    with _own_errors():
        save(dict(tensors), storage_writer=writer, planner=planner, no_dist=True)


def load_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read this rank's shards of the tensors that are sharded in `like`, and all other tensors of the folder whole."""
    reader = HuggingFaceStorageReader(str(folder))
    tensors = {
        name: _empty(like.get(name), saved.size, saved.properties.dtype)
        for name, saved in reader.read_metadata().state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    with _own_errors():
        load(tensors, storage_reader=reader, planner=DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    return tensors


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raises the errors of this rank instead of torch's collection of all ranks' errors, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _empty(like: Tensor | None, size: torch.Size, dtype: torch.dtype) -> Tensor:
    if not isinstance(like, DTensor):
        return torch.empty(size, dtype=dtype)
    return empty(size, dtype=dtype, device_mesh=like.device_mesh, placements=like.placements)


class _ShardWriter(HuggingFaceStorageWriter):
    """Names files by the rank, which torch itself learns from the rank that coordinates."""

    def __init__(self, folder: Path, rank: int, file_numbers: dict[str, int]) -> None:
        super().__init__(str(folder), file_numbers, save_distributed=True)
        self._rank = rank
        # Without it torch would use a CUDA stream, of device 0, for tensors that are in main memory already.
        self.per_thread_copy_ahead = 0

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        prepared = super().prepare_global_plan(plans)
        for plan in prepared:
            plan.storage_data["shard_index"] = self._rank + 1
        return prepared


class _ShardPlanner(DefaultSavePlanner):
    """Does not demand that one rank's shards are the whole tensors."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)
