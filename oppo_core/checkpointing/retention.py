"""Retention: deletes old checkpoints after a new one was written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from oppo_contract.checkpoint_pins import pinned_names, pins_exist, pins_locked
from oppo_core.checkpointing.atomic_dir import MANIFEST, remove

NAME = re.compile(r"step-\d{8}(-chunk-\d{6})?")


def checkpoints_to_prune(names: list[str], present: str, scores: dict[str, float], keep: int, keep_best: int) -> list[str]:
    """Checkpoints that are neither among the `keep` newest nor among the `keep_best` best, after `present` was written.

    Names sort by age. Checkpoints newer than `present` belong to another attempt and are retained. Of equal scores the newer
    checkpoint wins; a NaN score never does.
    """
    past = sorted(name for name in names if name <= present)
    scored = [name for name in past if name in scores and scores[name] == scores[name]]
    best = sorted(scored, key=lambda name: (scores[name], name))[-keep_best:] if keep_best else []
    return [name for name in past[:-keep] if name not in best]


def checkpoint_names(folder: Path) -> list[str]:
    """Names of the complete checkpoints in `folder`; links, drafts and stray files are not among them."""
    return [path.name for path in folder.iterdir() if NAME.fullmatch(path.name) and _is_complete(path)]


def _is_complete(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file()


def delete(out: Path, names: Sequence[str]) -> None:
    """Delete checkpoints of a run, except pinned ones: another run resumes from those."""
    folders = [out / "checkpoints" / name for name in names]
    if not pins_exist(out):
        remove(folders)
        return
    with pins_locked(out):
        pinned = pinned_names(out)
        remove([folder for folder in folders if folder.name not in pinned])
