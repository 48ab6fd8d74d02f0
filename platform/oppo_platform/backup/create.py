"""Makes a backup: the database as of one instant, what is known of every checkpoint, and, if asked for, keys and their files.

The manifest's counts come from the snapshot that pg_dump reads, so they agree to the row while everybody writes on.
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
from oppo_platform.backup.archive import CHECKPOINTS, DATABASE, READ_BYTES, Tell, Write, Writer, new_archive
from oppo_platform.backup.snapshot import Snapshot, held
from oppo_platform.runs.checkpoints import NotReadable, files_readable, open_files
from oppo_platform.runs.models import Checkpoint

TELL_EVERY_S = 5.0
LISTED = ("id", "run_id", "attempt_id", "step", "url", "bytes", "manifest_sha256")


@dataclass(frozen=True, slots=True)
class Made:
    """A backup that is there: where, how large in bytes, and its manifest."""

    file: Path
    bytes: int
    manifest: dict[str, Any]


class Progress:
    """Says how much has been written, at most every few seconds."""

    def __init__(self, what: str, tell: Tell, write: Write) -> None:
        self._what, self._tell, self._write = what, tell, write
        self._bytes, self._next = 0, time.monotonic() + TELL_EVERY_S

    def __call__(self, piece: bytes) -> None:
        self._write(piece)
        self._bytes += len(piece)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + TELL_EVERY_S
            self._tell(f"  {self._what}: {self._bytes:,} bytes so far")


def place_for(wanted: Path, at: datetime) -> Path:
    """The file that is meant: `wanted`, or one with the time in its name where that is a folder."""
    return wanted / f"oppo-backup-{at:%Y%m%dT%H%M%SZ}.tar" if wanted.is_dir() else wanted


def make(url: str, wanted: Path, tell: Tell, *, with_keys: bool = False, with_checkpoints: bool = False) -> Made:
    """Write a backup of the platform that `url` and Django's settings name.

    Args:
        url: the database.
        wanted: a file that is not there yet, or a folder that is.
        tell: takes lines for people who wait.
        with_keys: put the secret key and the keys of team secrets into it.
        with_checkpoints: put in the files of those checkpoints that lie on this machine.

    Raises:
        BackupRefused: it cannot be made like this. BackupError: it went wrong; nothing is left of it.
    """
    with held(url, with_files=with_checkpoints) as snapshot:
        tool = pg_tools.program("pg_dump", major := int(snapshot.server_version.split(".")[0]))
        if not pg_tools.fills(tool, major):
            tell(f"NOTE: with pg_dump {tool.version} it can be restored to PostgreSQL {pg_tools.LEAST_FOR_NEW} and later only.")
        file = place_for(wanted, snapshot.at)
        with new_archive(file) as archive:
            tell(f"Database of {snapshot.bytes:,} bytes, with pg_dump {tool.version} …")
            with archive.member(DATABASE) as write:
                pg_tools.dump(tool, url, snapshot.name, Progress("database", tell, write))
            listed = _checkpoints(snapshot, archive, tell, with_checkpoints)
            archive.add(CHECKPOINTS, json.dumps(listed, indent=1).encode())
            if with_keys:
                archive.add(keys.MEMBER, keys.keys_here().as_json())
            archive.seal(manifest := _manifest(snapshot, tool, listed, with_keys))
        return Made(file, file.stat().st_size, manifest)


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
        "keys": {"included": with_keys, **keys.keys_here().fingerprints()},
    }


def _checkpoints(snapshot: Snapshot, archive: Writer, tell: Tell, with_files: bool) -> list[dict[str, Any]]:
    """Every registered checkpoint, with `files` (here, deleted or elsewhere) and, for those in the backup, `members`."""
    listed = []
    for number, row in enumerate(snapshot.checkpoints, 1):
        entry: dict[str, Any] = {field: getattr(row, field) for field in LISTED}
        entry["registered_at"] = row.registered_at.astimezone(UTC).isoformat()
        entry["files"] = "here" if row.pk in snapshot.opened else files_readable(row)
        if with_files and entry["files"] == "here":
            tell(f"Checkpoint {number} of {len(snapshot.checkpoints)}: run {row.run_id}, step {row.step}, {row.bytes:,} bytes …")
            entry |= _with_files(row, snapshot.opened.get(row.pk), archive, tell)
        listed.append(entry)
    return listed


def _with_files(row: Checkpoint, opened: list[tuple[str, int, int]] | None, archive: Writer, tell: Tell) -> dict[str, Any]:
    """The checkpoint's files become members; its own name for each is told beside, and looked at when it is put back."""
    with ExitStack() as files:
        try:
            opened = opened or open_files(row, files)
        except (NotReadable, OSError) as error:  # a run goes on deleting what it need not keep
            tell(f"  left out: {error}")
            return {"files": files_readable(row), "left_out": str(error)}
        members = {}
        for number, (path, descriptor, size) in enumerate(opened):
            members[path] = f"checkpoints/{row.pk}/{number}"
            with archive.member(members[path]) as write:
                _copy(descriptor, size, Progress(path, tell, write))
    return {"members": members}


def _copy(descriptor: int, size: int, write: Write) -> None:
    left = size
    while left:
        piece = os.read(descriptor, min(left, READ_BYTES))
        if not piece:
            raise BackupError("A checkpoint's file has become shorter while it was read.")
        write(piece)
        left -= len(piece)
