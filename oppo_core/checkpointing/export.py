"""Export: the trained actor as a plain model folder that others read, taken from a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

from oppo_core.checkpointing.save_restore import CheckpointError, intact
from oppo_core.models.model_io import ADAPTERS
from oppo_core.ppo.actor import WEIGHTS


def export_actor(checkpoint: Path, out: Path) -> list[str]:
    """Copy the actor of `checkpoint` to the new folder `out`, tokenizer included; returns the names of its files.

    A Hugging Face actor becomes what `from_pretrained` reads, low-rank adapters merged in.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or `out` exists already.
    """
    intact(checkpoint)
    if out.exists():
        raise CheckpointError(f"{out} exists already; name a folder that does not")
    shutil.copytree(checkpoint / WEIGHTS, out, ignore=shutil.ignore_patterns(ADAPTERS))
    return sorted(path.name for path in out.iterdir())
