"""Small things that several processes need of the machine they run on: its cores, and files that only their owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_private(file: Path, text: str, *, synced: bool = True) -> None:
    """Write a file that only its owner can read: whole or not at all, also on a full disk or when the process is killed.

    `synced`: also when the power fails; not worth the time for what is written every second and may be lost.
    """
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
            out.flush()
            if synced:
                os.fsync(out.fileno())
        fresh.replace(file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    if synced:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Write the folder's entries to the disk, so that a renamed file is found after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
