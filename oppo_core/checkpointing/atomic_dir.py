"""Atomic, durable folders: written beside their destination, fsynced, and renamed into place.

Until the rename the destination's former content is untouched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_contract.machine import mib

MANIFEST = "manifest.json"
Entries = dict[str, dict[str, Any]]
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, resumed or written, with the reason."""


class DiskFullError(RuntimeError):
    """Too little disk space for a checkpoint; names the folder, the bytes needed and free, and a remedy."""


@dataclass(frozen=True, slots=True)
class Published:
    """A published folder: SHA-256 of its manifest, and the size of all other files in bytes."""

    digest: str
    size: int


@contextmanager
def new_draft(folder: Path, needed: int) -> Iterator[Path]:
    """An empty folder beside `folder` to write into; deleted if the block raises.

    Args:
        needed: estimate of the bytes that will be written; checked against the free space first.

    Raises:
        DiskFullError: too little space, before or while writing.
    """
    # A name of its own: a rank of an earlier attempt may still write into that attempt's draft.
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.draft")
    try:
        with disk_full_explained(folder.parent, needed):
            draft.mkdir(parents=True)
            free = shutil.disk_usage(draft).free
            if free < needed:
                raise DiskFullError(_no_room(folder.parent, needed, free))
            yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


@contextmanager
def disk_full_explained(folder: Path, needed: int) -> Iterator[None]:
    """Raises DiskFullError instead of an error that a full disk caused. `needed`: estimate of a checkpoint's bytes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not is_disk_full(error):
            raise
        raise DiskFullError(f"{_no_room(folder, needed, free_bytes(folder))} ({error})") from error


def publish(draft: Path, folder: Path, described: Entries | None = None) -> Published:
    """Write the manifest, fsync everything, and rename `draft` to `folder`. `described`: entries that other ranks have made."""
    described = described or {}
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    manifest = described | describe(draft, [path for path in files if str(path.relative_to(draft)) not in described])
    (draft / MANIFEST).write_text(json.dumps(dict(sorted(manifest.items())), indent=1))
    for path in [draft / MANIFEST, *(path for path in draft.rglob("*") if path.is_dir()), draft]:
        sync(path)
    published = Published(sha256(draft / MANIFEST), sum(entry["bytes"] for entry in manifest.values()))
    former = _former(folder)
    if os.path.lexists(folder):
        _delete(former)
        os.replace(folder, former)
    os.replace(draft, folder)
    sync(folder.parent)
    _delete(former)
    return published


def describe(draft: Path, files: Iterable[Path]) -> Entries:
    """Fsync files of a draft; returns their entries of the manifest: SHA-256 and size by relative path."""
    entries: Entries = {}
    for path in files:
        sync(path)
        entries[str(path.relative_to(draft))] = {"sha256": sha256(path), "bytes": path.stat().st_size}
    return entries


def remove(folders: Sequence[Path]) -> None:
    """Delete folders. Each is renamed first, so a killed process leaves no incomplete one under its name."""
    drafts = [_draft(folder) for folder in folders]
    for folder, draft in zip(folders, drafts, strict=True):
        _delete(draft)
        os.replace(folder, draft)
    for draft in drafts:
        _delete(draft)


def restore_former(folder: Path) -> None:
    """Undo the first rename of a `publish` that was killed before its second."""
    if not folder.exists() and _former(folder).exists():
        os.replace(_former(folder), folder)


def recover(parent: Path) -> None:
    """Delete the drafts of killed processes in `parent` and restore displaced folders. No other process may write there."""
    for former in list(parent.glob(".*.former")):
        restore_former(parent / former.name.removeprefix(".").removesuffix(".former"))
    for leftover in (*parent.glob(".*.former"), *parent.glob(".*.draft")):
        _delete(leftover)


def _delete(path: Path) -> None:
    """Delete a folder, or a stray file or link in its place; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_disk_full(error: Exception) -> bool:
    """Whether an error means a full disk; recognizes the OS's message in errors of libraries and other processes."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return True
    return any(os.strerror(code) in str(error) for code in DISK_FULL)


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def sha256(path: Path) -> str:
    """A file's SHA-256 as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _no_room(folder: Path, needed: int, free: int) -> str:
    return (
        f"no room for a checkpoint in {folder}: it needs about {mib(needed)}, {mib(free)} are free; earlier checkpoints are"
        " complete. Free some space, or lower checkpoints.keep and checkpoints.keep_best, and resume"
    )


def _draft(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.draft")


def _former(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.former")


def sync(path: Path) -> None:
    """Fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
