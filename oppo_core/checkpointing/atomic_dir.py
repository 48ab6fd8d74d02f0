"""Folders that appear whole or not at all, and stay there when the power fails.

A folder is written beside its place, every file and folder is synced to the disk, and one rename puts it there. What lay there
before is untouched until then.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oppo_contract.machine import mib

MANIFEST = "manifest.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(RuntimeError):
    """There is no room for a checkpoint: where, how much is needed and free, and what to do."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What a complete folder is told by: the manifest's SHA-256, and the size of all other files in bytes."""

    digest: str
    size: int


@contextmanager
def draft_of(folder: Path, needed: int) -> Iterator[Path]:
    """An empty folder beside `folder` to write into; it is gone when the block fails.

    Args:
        needed: bytes that will be written, as far as is known; looked for beforehand, so that nothing is half-written.

    Raises:
        DiskFullError: there is no room, or there was none left on the way.
    """
    draft = folder.with_name(f".{folder.name}.draft")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
        if free < needed:
            raise DiskFullError(_no_room(folder.parent, needed, free))
        yield draft
    except BaseException as error:
        free = shutil.disk_usage(_existing(draft)).free
        shutil.rmtree(draft, ignore_errors=True)
        if isinstance(error, Exception) and not isinstance(error, DiskFullError) and is_disk_full(error):
            raise DiskFullError(f"{_no_room(folder.parent, needed, free)} ({error})") from error
        raise


def publish(draft: Path, folder: Path) -> Seal:
    """Write the manifest, sync everything, and put `draft` into the place of `folder`."""
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(draft)): {"sha256": sha256(path), "bytes": path.stat().st_size} for path in files}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*files, draft / MANIFEST, *(path for path in draft.rglob("*") if path.is_dir()), draft]:
        _sync(path)
    seal = Seal(sha256(draft / MANIFEST), sum(path.stat().st_size for path in files))
    former = _former(folder)
    if folder.exists():
        shutil.rmtree(former, ignore_errors=True)
        os.replace(folder, former)
    os.replace(draft, folder)
    _sync(folder.parent)
    shutil.rmtree(former, ignore_errors=True)
    return seal


def sync_files(folder: Path) -> None:
    """Sync every file below `folder`, for others to publish."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        _sync(path)


def remove(folders: Sequence[Path]) -> None:
    """Delete folders. Each is there whole, or gone, at every instant; what is killed on the way is tidied later."""
    aside = [folder.with_name(f".{folder.name}.draft") for folder in folders]
    for folder, draft in zip(folders, aside, strict=True):
        shutil.rmtree(draft, ignore_errors=True)
        os.replace(folder, draft)
    for draft in aside:
        shutil.rmtree(draft)


def heal(folder: Path) -> None:
    """Put back what `publish` had taken out of the way when it was killed between its two renames."""
    if not folder.exists() and _former(folder).exists():
        os.replace(_former(folder), folder)


def tidy(parent: Path) -> None:
    """Delete what a killed process has left unfinished below `parent`, and put back what it had taken out of the way.

    Nobody else may be writing there.
    """
    for former in list(parent.glob(".*.former")):
        heal(parent / former.name.removeprefix(".").removesuffix(".former"))
    for left in (*parent.glob(".*.former"), *parent.glob(".*.draft")):
        shutil.rmtree(left)


def is_disk_full(error: Exception) -> bool:
    """Whether an error, also one that has come through another library or process as text, says that the disk is full."""
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return any(os.strerror(code) in str(error) for code in FULL)


def sha256(path: Path) -> str:
    """A file's digest."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _no_room(folder: Path, needed: int, free: int) -> str:
    return (
        f"no room for a checkpoint in {folder}: about {mib(needed)} are needed, {mib(free)} are free; the checkpoints written"
        " before are whole. Free some space, or lower checkpoints.keep and checkpoints.keep_best, and resume"
    )


def _former(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.former")


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
