"""Helpers shared by all processes: available CPU cores, limit of open files, atomic writes of private files, fsync of folders."""

from __future__ import annotations

import os
import resource
import secrets
from pathlib import Path

MOST_OPEN_FILES = 65_536


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def raise_open_file_limit() -> None:
    """Raise this process's soft limit of open files towards its hard one.

    Each tensor in shared memory holds a file: with update overlap up to four per weight, and the usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def mib(size: int) -> str:
    """`size` bytes as `12.3 MiB`."""
    return f"{size / 2**20:,.1f} MiB"


def write_private(file: Path, text: str, *, synced: bool = True) -> None:
    """Write a file with mode 0600 atomically: a full disk or a killed process leaves the old content.

    `synced` also survives a power failure; too slow for state that is written every second and may be lost.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as out:
            out.write(text)
            out.flush()
            if synced:
                os.fsync(out.fileno())
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if synced:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """fsync the folder, so that a renamed file survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
