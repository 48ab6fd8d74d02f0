"""Checkpoint pins: the supervisor names checkpoints that the platform may resume from, and the engine does not delete them.

Guarantee: a checkpoint that is registered, or being registered, is on disk. The engine prunes old checkpoints without knowing
which are registered. So the supervisor pins the newest registered one *before* it registers another, and both hold one lock: the
engine while it deletes, the supervisor while it pins a checkpoint and checks that it exists. Pins are files, because the engine
has no HTTP client and may have another version: `spared/17` in the run's artifact folder, for attempt 17, holds one name of a
folder below `checkpoints/` per line. Without that folder (an engine without a platform) nothing is pinned. Standard library only.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER, LOCK = "spared", "lock"


def pins_exist(artifacts: Path) -> bool:
    """Whether a supervisor pins checkpoints of this run."""
    return (artifacts / FOLDER).is_dir()


@contextmanager
def pins_locked(artifacts: Path) -> Iterator[None]:
    """Exclude concurrent pinning and deletion of checkpoints."""
    (artifacts / FOLDER).mkdir(parents=True, exist_ok=True)
    with (artifacts / FOLDER / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_pins(artifacts: Path, attempt_id: int, names: Iterable[str]) -> None:
    """Replace the attempt's pins. Call with the lock held."""
    temporary = artifacts / FOLDER / f"{attempt_id}.new"
    temporary.write_text("".join(f"{name}\n" for name in names))
    temporary.replace(artifacts / FOLDER / str(attempt_id))


def remove_older_pins(artifacts: Path, attempt_id: int) -> None:
    """Delete the pins of earlier attempts; the new attempt pins what it resumes from. Call with the lock held."""
    for file in _pin_files(artifacts):
        if int(file.name) < attempt_id:
            file.unlink()


def pinned_names(artifacts: Path) -> frozenset[str]:
    """Folder names pinned by any attempt. Call with the lock held."""
    return frozenset(name for file in _pin_files(artifacts) for name in file.read_text().splitlines())


def _pin_files(artifacts: Path) -> list[Path]:
    return [file for file in (artifacts / FOLDER).iterdir() if file.name.isdigit()]
