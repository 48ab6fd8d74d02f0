"""Restores checkpoint files from a backup to the folders in the restored database.

The target is computed from the database's row and the current artifact root; file names in the backup are validated. Existing
checkpoints are not changed, and a checkpoint is restored completely or not at all.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from django.conf import settings
from django.db import connection, transaction

from oppo_platform.backup import BackupError
from oppo_platform.backup.archive import Archive, Report
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.checkpoints import MANIFEST, NotReadable, files_readable, local_folder
from oppo_platform.runs.models import Checkpoint


def former_roots(listed: list[dict[str, Any]]) -> list[str]:
    """Artifact roots of a backup's checkpoints other than the present one: their URLs are `{root}/runs/{run}/…`."""
    roots = {entry["url"].rpartition(f"/runs/{entry['run_id']}/")[0] for entry in listed}
    return sorted(roots - {settings.OPPO_ARTIFACT_ROOT, ""})


def move_to_present_root() -> None:
    """Point registered checkpoints to the present artifact root. Workers read no other one."""
    moved = []
    for row in Checkpoint.objects.only("pk", "run_id", "url").iterator():
        root, _, rest = row.url.rpartition(f"/runs/{row.run_id}/")
        if root and root != settings.OPPO_ARTIFACT_ROOT:
            row.url = f"{artifact_url(row.run_id)}/{rest}"
            moved.append(row)
    table = Checkpoint._meta.db_table
    with transaction.atomic(), connection.cursor() as cursor:
        # The trigger rejects updates of ended attempts' checkpoints. The database is not in use before the swap.
        cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER oppo_fence_checkpoint")
        Checkpoint.objects.bulk_update(moved, ["url"], batch_size=1000)
        cursor.execute(f"ALTER TABLE {table} ENABLE TRIGGER oppo_fence_checkpoint")


def restore_files(archive: Archive, listed: list[dict[str, Any]], report: Report) -> int:
    """Restore checkpoints that are in the backup and not on this machine. Returns their number; failures are reported."""
    done = 0
    for entry in (entry for entry in listed if "members" in entry):
        row = Checkpoint.objects.filter(pk=entry["id"], manifest_sha256=entry["manifest_sha256"]).first()
        if row is None or files_readable(row) == "here":
            continue
        try:
            _restore(archive, row, entry["members"])
        except (NotReadable, BackupError, OSError) as error:
            report(f"  checkpoint of run {row.run_id}, step {row.step}, is not put back: {error}")
        else:
            report(f"Checkpoint of run {row.run_id}, step {row.step}: {row.bytes:,} bytes put back.")
            done += 1
    return done


def _restore(archive: Archive, row: Checkpoint, members: dict[str, str]) -> None:
    """Write to a draft folder and rename it. Raises NotReadable for a folder outside the run's, BackupError for bad files."""
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
    """The path if it is relative and stays below its folder; else raises BackupError."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or not relative.parts or ".." in relative.parts or "\0" in path:
        raise BackupError(f"the backup names {path!r}, which is no file of a checkpoint")
    return relative


def _write(file: Path, archive: Archive, member: str) -> None:
    if member not in archive.places:
        raise BackupError(f"the backup holds no {member}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("xb") as out:
        for piece in archive.pieces(member):
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
