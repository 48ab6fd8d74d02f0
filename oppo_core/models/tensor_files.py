"""Tensors by name in safetensors files: a file of whole tensors, and beside it a folder of the shards of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from oppo_core.distributed.process_group import Ranks

SHARDS = ".shards"


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write whole tensors."""
    save_file({name: weight.detach().contiguous().cpu() for name, weight in weights.items()}, path)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, ranks: Ranks) -> None:
    """Every rank calls it, without communication: the first one writes the whole tensors, and every rank its shards."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    if ranks.first:
        save_weights({name: tensor for name, tensor in tensors.items() if name not in sharded}, path)
    if sharded:
        from oppo_core.models.shard_files import save_shards  # torch takes a while to import what it needs

        save_shards(sharded, shards_of(path), ranks)


def load_tensors(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote with any number of ranks: this rank's shards of what is sharded in `like`, all else whole.

    `like` may have other names than the file, too.
    """
    tensors: dict[str, Tensor] = load_file(path)
    if shards_of(path).is_dir():
        from oppo_core.models.shard_files import load_shards

        tensors |= load_shards(shards_of(path), like)
    return tensors


def shards_of(path: Path) -> Path:
    """The folder beside a file."""
    return path.with_suffix(SHARDS)


def shards_of_rank(checkpoint: Path, rank: int) -> list[Path]:
    """The files of a rank's shards, which torch names."""
    return sorted(checkpoint.glob(f"*{SHARDS}/shard-{rank + 1:05d}-*.safetensors"))


class Writer:
    """Writes the parts of a checkpoint, at once. `checkpointing.background` has one that does so while training goes on."""

    def copy(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The tensors as they are now until they are written: here those given. `dtype`: of shards; default: their own."""
        sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        return {**tensors, **{name: tensor.to(dtype or tensor.dtype) for name, tensor in sharded.items()}}

    def add(self, write: Callable[[], None]) -> None:
        """Write a part, which consists of tensors that `copy` returned."""
        write()

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once, having reported a checkpoint or an error."""
        return False

    @property
    def failure(self) -> BaseException | None:
        """What `wait` would raise at once."""
        return None

    def wait(self, others_s: float | None = None) -> None:
        """Block until the checkpoint that is being written is published, and report it. Raises what went wrong.

        With `others_s` it is given up if the other ranks have not written their parts that many seconds after this one.
        """
