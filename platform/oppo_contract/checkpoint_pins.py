"""Checkpoints that must not be deleted, because the platform resumes from them: told by the supervisor, obeyed by the engine.

Law: a checkpoint that is registered, or whose registration is under way, is on disk. The engine deletes old checkpoints as its
spec says, but does not know which of them the platform knows. Cut off from the platform it would write newer ones, delete the
registered one, be fenced, and leave a run that resumes from nothing. So a supervisor names the newest one that is registered
*before* it registers another, and both hold one lock: the engine while it takes folders away, the supervisor while it names one
and looks whether it is still there. Files, because the engine imports no HTTP library and may be of another version. They lie in
the run's artifact folder: `spared/17` for attempt 17, one name of a folder below `checkpoints/` a line. An engine that runs
without a platform finds no such folder and spares nothing. Standard library only.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER, LOCK = "spared", "lock"


def pins_exist(artifacts: Path) -> bool:
    """Whether somebody names checkpoints of this run."""
    return (artifacts / FOLDER).is_dir()


@contextmanager
def pins_locked(artifacts: Path) -> Iterator[None]:
    """Keep the other side from naming or deleting checkpoints meanwhile."""
    (artifacts / FOLDER).mkdir(parents=True, exist_ok=True)
    with (artifacts / FOLDER / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_pins(artifacts: Path, attempt_id: int, names: Iterable[str]) -> None:
    """Name the folders that an attempt must find again; replaces what it named before. Call with the lock held."""
    fresh = artifacts / FOLDER / f"{attempt_id}.new"
    fresh.write_text("".join(f"{name}\n" for name in names))
    fresh.replace(artifacts / FOLDER / str(attempt_id))


def remove_older_pins(artifacts: Path, attempt_id: int) -> None:
    """Let earlier attempts name nothing any more: what a run resumes from, the new one names itself. Call with the lock held."""
    for file in _files(artifacts):
        if int(file.name) < attempt_id:
            file.unlink()


def pinned_names(artifacts: Path) -> frozenset[str]:
    """Every name that some attempt needs. Call with the lock held."""
    return frozenset(name for file in _files(artifacts) for name in file.read_text().splitlines())


def _files(artifacts: Path) -> list[Path]:
    return [file for file in (artifacts / FOLDER).iterdir() if file.name.isdigit()]
