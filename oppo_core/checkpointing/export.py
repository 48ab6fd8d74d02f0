"""Exports the trained actor of a checkpoint as a plain model folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from oppo_core.checkpointing.save_restore import CheckpointError, check_intact
from oppo_core.models.model_io import ADAPTERS
from oppo_core.ppo.actor import WEIGHTS


def export_actor(checkpoint: Path, out: Path) -> list[str]:
    """Copy the actor of `checkpoint`, tokenizer included, to the new folder `out`; returns the file names.

    A Hugging Face actor can be loaded by `from_pretrained`, with LoRA adapters merged.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or `out` exists already.
    """
    check_intact(checkpoint)
    if out.exists():
        raise CheckpointError(f"{out} exists already; name a folder that does not")
    shutil.copytree(checkpoint / WEIGHTS, out, ignore=shutil.ignore_patterns(ADAPTERS))
    return sorted(path.name for path in out.iterdir())
