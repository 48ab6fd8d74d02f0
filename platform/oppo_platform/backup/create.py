"""Creates a backup: the database at one instant, a list of all checkpoints, and optionally keys and checkpoint files.

The manifest's row counts come from the snapshot that pg_dump reads, so they match exactly during concurrent writes.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from oppo_platform.backup import BackupError, keys, pg_tools
from oppo_platform.backup.archive import CHECKPOINTS, DATABASE, READ_BYTES, Report, Write, Writer, new_archive
from oppo_platform.backup.snapshot import Snapshot, hold_snapshot
from oppo_platform.runs.checkpoints import NotReadable, files_readable, open_files
from oppo_platform.runs.models import Checkpoint

REPORT_EVERY_S = 5.0
LISTED = ("id", "run_id", "attempt_id", "step", "url", "bytes", "manifest_sha256")


@dataclass(frozen=True, slots=True)
class Backup:
    """A completed backup."""

    file: Path
    bytes: int
    manifest: dict[str, Any]


class Progress:
    """Reports the number of bytes written, every few seconds."""

    def __init__(self, what: str, report: Report, write: Write) -> None:
        self._what, self._report, self._write = what, report, write
        self._bytes, self._next = 0, time.monotonic() + REPORT_EVERY_S

    def __call__(self, piece: bytes) -> None:
        self._write(piece)
        self._bytes += len(piece)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_EVERY_S
            self._report(f"  {self._what}: {self._bytes:,} bytes so far")


def backup_file(target: Path, at: datetime) -> Path:
    """`target`, or a file in it named after the time if it is a folder."""
    return target / f"oppo-backup-{at:%Y%m%dT%H%M%SZ}.tar" if target.is_dir() else target


def create_backup(url: str, target: Path, report: Report, *, with_keys: bool = False, with_checkpoints: bool = False) -> Backup:
    """Write a backup of the platform with the database `url` and Django's settings.

    Args:
        url: the database.
        target: a file that does not exist, or an existing folder.
        tell: receives progress lines.
        with_keys: include the secret key and the keys of team secrets.
        with_checkpoints: include the files of checkpoints on this machine.

    Raises:
        BackupRefused: the request is refused. BackupError: the backup failed; no file is left.
    """
    with hold_snapshot(url, with_files=with_checkpoints) as snapshot:
        tool = pg_tools.find_program("pg_dump", major := int(snapshot.server_version.split(".")[0]))
        if not pg_tools.is_compatible(tool, major):
            report(f"NOTE: with pg_dump {tool.version} it can be restored to PostgreSQL {pg_tools.MIN_FOR_NEW} and later only.")
        file = backup_file(target, snapshot.at)
        with new_archive(file) as archive:
            report(f"Database of {snapshot.bytes:,} bytes, with pg_dump {tool.version} …")
            with archive.member(DATABASE) as write:
                pg_tools.dump(tool, url, snapshot.name, Progress("database", report, write))
            listed = _checkpoints(snapshot, archive, report, with_checkpoints)
            archive.add(CHECKPOINTS, json.dumps(listed, indent=1).encode())
            if with_keys:
                archive.add(keys.MEMBER, keys.current_keys().as_json())
            archive.finish(manifest := _manifest(snapshot, tool, listed, with_keys))
        return Backup(file, file.stat().st_size, manifest)


def _manifest(snapshot: Snapshot, tool: pg_tools.Program, listed: list[dict[str, Any]], with_keys: bool) -> dict[str, Any]:
    return {
        "platform_version": version("oppo-platform"),
        "made_at": snapshot.at.isoformat(),
        "postgres": snapshot.server_version,
        "pg_dump": tool.version,
        "migrations": snapshot.migrations,
        "rows": snapshot.rows,
        "numbered_by_hand": snapshot.numbered_by_hand,
        "live_attempts": snapshot.live_attempts,
        "checkpoints": {
            "registered": len(listed),
            "here": sum(row["files"] == "here" for row in listed),
            "included": sum("members" in row for row in listed),
            "bytes": sum(row["bytes"] for row in listed),
        },
        "keys": {"included": with_keys, **keys.current_keys().fingerprints()},
    }


def _checkpoints(snapshot: Snapshot, archive: Writer, report: Report, with_files: bool) -> list[dict[str, Any]]:
    """Registered checkpoints with `files` (here, deleted or elsewhere) and, if their files are included, `members`."""
    listed = []
    for number, row in enumerate(snapshot.checkpoints, 1):
        entry: dict[str, Any] = {field: getattr(row, field) for field in LISTED}
        entry["registered_at"] = row.registered_at.astimezone(UTC).isoformat()
        entry["files"] = "here" if row.pk in snapshot.opened else files_readable(row)
        if with_files and entry["files"] == "here":
            report(
                f"Checkpoint {number} of {len(snapshot.checkpoints)}: run {row.run_id}, step {row.step}, {row.bytes:,} bytes …"
            )
            entry |= _with_files(row, snapshot.opened.get(row.pk), archive, report)
        listed.append(entry)
    return listed


def _with_files(row: Checkpoint, opened: list[tuple[str, int, int]] | None, archive: Writer, report: Report) -> dict[str, Any]:
    """Add the checkpoint's files as members. Returns `members`: names by path in the checkpoint, validated at restore."""
    with ExitStack() as files:
        try:
            opened = opened or open_files(row, files)
        except (NotReadable, OSError) as error:  # running runs delete old checkpoints meanwhile
            report(f"  left out: {error}")
            return {"files": files_readable(row), "left_out": str(error)}
        members = {}
        for number, (path, descriptor, size) in enumerate(opened):
            members[path] = f"checkpoints/{row.pk}/{number}"
            with archive.member(members[path]) as write:
                _copy(descriptor, size, Progress(path, report, write))
    return {"members": members}


def _copy(descriptor: int, size: int, write: Write) -> None:
    left = size
    while left:
        piece = os.read(descriptor, min(left, READ_BYTES))
        if not piece:
            raise BackupError("A checkpoint's file has become shorter while it was read.")
        write(piece)
        left -= len(piece)
