"""Files of checkpoints, from a backup to where the restored database says that they lie.

Where a file goes is decided by the database's row and the present artifact root; the backup's own words for it are held against
the same rules as a worker's. A checkpoint whose files are there is left alone, and one is whole or not there.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from oppo_platform.backup import BackupError
from oppo_platform.backup.archive import Archive, Tell
from oppo_platform.runs.checkpoints import MANIFEST, NotReadable, files_readable, local_folder
from oppo_platform.runs.models import Checkpoint


def put_back(archive: Archive, listed: list[dict[str, Any]], tell: Tell) -> int:
    """Put back those that are in the backup and not on this machine. Returns how many; what could not be is told."""
    done = 0
    for entry in (entry for entry in listed if "members" in entry):
        row = Checkpoint.objects.filter(pk=entry["id"], manifest_sha256=entry["manifest_sha256"]).first()
        if row is None or files_readable(row) == "here":
            continue
        try:
            _put(archive, row, entry["members"])
        except (NotReadable, BackupError, OSError) as error:
            tell(f"  checkpoint of run {row.run_id}, step {row.step}, is not put back: {error}")
        else:
            tell(f"Checkpoint of run {row.run_id}, step {row.step}: {row.bytes:,} bytes put back.")
            done += 1
    return done


def _put(archive: Archive, row: Checkpoint, members: dict[str, str]) -> None:
    """Write beside the place and rename. Raises NotReadable when the place is none of the run's, BackupError for odd files."""
    folder = local_folder(row)
    manifest = archive.read(members[MANIFEST]) if members.get(MANIFEST) in archive.places else b""
    if hashlib.sha256(manifest).hexdigest() != row.manifest_sha256:
        raise BackupError("its manifest in the backup is not the one that was registered")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.draft")
    draft.mkdir()
    try:
        for path, member in members.items():
            _write(draft / contained(path), archive, member)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def contained(path: str) -> PurePosixPath:
    """The path, if it leads to a file below. Raises BackupError."""
    wanted = PurePosixPath(path)
    if wanted.is_absolute() or not wanted.parts or ".." in wanted.parts or "\0" in path:
        raise BackupError(f"the backup names {path!r}, which is no file of a checkpoint")
    return wanted


def _write(file: Path, archive: Archive, member: str) -> None:
    if member not in archive.places:
        raise BackupError(f"the backup holds no {member}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as out:
        for piece in archive.pieces(member):
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
