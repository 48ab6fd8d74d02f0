"""Puts a backup back: verify → refuse what cannot be → fill a fresh database → migrate → settle → take the old one's place.

The old database is renamed, not deleted. Whatever fails, or is killed, before that one transaction leaves it as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from django.core.management import call_command
from django.db import connections
from django.db.migrations.loader import MigrationLoader

from oppo_platform.backup import BackupError, BackupRefused, checkpoint_files, keys, pg_tools, post_restore, snapshot
from oppo_platform.backup.archive import CHECKPOINTS, DATABASE, Archive, Tell, refuse_incomplete
from oppo_platform.backup.create import Progress
from oppo_platform.backup.databases import Server


@dataclass(slots=True)
class Restored:
    """What a restore did and found."""

    kept: str = ""  # name that the database of before has now
    runs: int = 0
    attempts_ended: int = 0
    migrated: list[str] = field(default_factory=list)
    checkpoints_put_back: int = 0
    missing: post_restore.Missing = field(default_factory=lambda: post_restore.Missing([], 0, 0))
    keys: list[str] = field(default_factory=list)
    sealed_for_ever: list[str] = field(default_factory=list)


def refuse_newer(manifest: dict[str, Any]) -> None:
    """Raises BackupRefused when the backup has migrations that this code does not know: it cannot go back."""
    known = MigrationLoader(None).disk_migrations
    newer = [f"{app}.{name}" for app, names in manifest["migrations"].items() for name in names if (app, name) not in known]
    if newer:
        raise BackupRefused(
            f"The backup is newer than this installation (OPPO {manifest['platform_version']}; unknown here: "
            f"{', '.join(newer)}). Install that version or a later one, and restore with it."
        )


def refuse_runs(server: Server, replace: bool) -> None:
    """Raises BackupRefused when the database has runs and nobody said that it may be replaced."""
    if replace or not server.exists():
        return
    with psycopg.connect(server.url, connect_timeout=10) as connection:
        found = connection.execute("SELECT to_regclass('runs_run') IS NOT NULL").fetchone()
        runs = connection.execute("SELECT count(*) FROM runs_run").fetchone() if found and found[0] else None
    if runs and runs[0]:
        raise BackupRefused(
            f"The database {server.name} has {runs[0]} runs, and nothing was changed. With --replace the backup takes its place; "
            "it is kept under another name."
        )


def restore(
    archive: Archive, server: Server, home: Path, what: str, tell: Tell, *, replace: bool, nothing_since: bool
) -> Restored:
    """Put a verified backup in the place of the platform's database. Django's connection points to the result afterwards.

    Args:
        archive: open and verified.
        server: where the platform's database is, or is to be.
        home: folder of the keys.
        what: the backup's name, for the audit log.
        tell: takes lines for people who wait.
        replace: whether a database that has runs may be put aside.
        nothing_since: nothing has happened since the backup, so that what ran goes on and numbers continue.

    Raises:
        BackupRefused: it is not done as asked. BackupError: it went wrong. Either way the old database is as it was.
    """
    brought = _understood(archive)
    tool = _loader(archive.manifest, server)
    server.refuse_rights()
    server.refuse_users()
    refuse_runs(server, replace)
    done, listed = Restored(), json.loads(archive.read(CHECKPOINTS))
    made_at = datetime.fromisoformat(archive.manifest["made_at"])
    stamp = server.stamp_at(datetime.now(UTC))
    with server.fresh() as name:
        _fill(archive, server.url_of(name), tool, tell)
        try:
            point_django(name)
            tell("Bringing it up to date …")
            done.migrated = _migrate()
            _settle(archive, server.url_of(name), made_at, what, nothing_since, done)
            done.checkpoints_put_back = checkpoint_files.put_back(archive, listed, tell)
            was_here = {entry["id"] for entry in listed if entry["files"] == "here"}
            done.missing = post_restore.missing_checkpoints(was_here)
        finally:
            point_django(server.name)
        done.kept = server.swap(name, stamp)
    _keys(archive, brought, home, stamp, done)
    return done


def _understood(archive: Archive) -> keys.Keys | None:
    """The keys in the backup, if it has any. Raises BackupRefused or BackupError for one that cannot be put back here."""
    refuse_incomplete(archive)
    refuse_newer(archive.manifest)
    return keys.keys_from(archive.read(keys.MEMBER)) if archive.manifest["keys"].get("included") else None


def _loader(manifest: dict[str, Any], server: Server) -> pg_tools.Program:
    """The pg_restore for it. Raises BackupRefused when the server is older than the one that the backup is of."""
    made, wrote = (int(str(manifest[key]).split(".")[0]) for key in ("postgres", "pg_dump"))
    if server.major < made:
        raise BackupRefused(
            f"The backup is of PostgreSQL {made}, and this server is {server.major}: it needs that major version or a later one."
        )
    tool = pg_tools.program("pg_restore", server.major, at_least=wrote)
    if not pg_tools.fills(tool, server.major):
        raise BackupRefused(
            f"pg_restore {tool.version} cannot fill a server of PostgreSQL {server.major}. Take one of {pg_tools.LEAST_FOR_NEW} "
            f"or later; or install PostgreSQL's client programs, version {server.major}, and make the backup anew with them."
        )
    return tool


def _fill(archive: Archive, url: str, tool: pg_tools.Program, tell: Tell) -> None:
    """Load the dump and hold what is there against the manifest. Raises BackupError when it differs."""
    tell(f"Loading {archive.places[DATABASE][1]:,} bytes into a new database, with pg_restore {tool.version} …")
    progress: Callable[[bytes], None] = Progress("database", tell, lambda piece: None)

    def pieces() -> Any:
        for piece in archive.pieces(DATABASE):
            yield piece
            progress(piece)

    pg_tools.load(tool, url, pieces())
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ANALYZE")
        found, wanted = snapshot.row_counts(connection), archive.manifest["rows"]
        wrong = [
            f"{t}: {found.get(t, 0)} rows, not {wanted.get(t, 0)}"
            for t in sorted({*found, *wanted})
            if found.get(t) != wanted.get(t)
        ]
        if wrong:
            raise BackupError(f"What was loaded is not what was backed up, and nothing was changed: {'; '.join(wrong[:5])}.")
        if behind := set(snapshot.sequences_behind(connection)) - set(archive.manifest["numbered_by_hand"]):
            raise BackupError(f"Numbers of {', '.join(sorted(behind))} would be given twice, and nothing was changed.")


def point_django(name: str) -> None:
    """Let Django's connection lead to another database of the same server from now on; nothing is open afterwards."""
    connection = connections["default"]
    connections.close_all()
    connection.close_pool()  # type: ignore[attr-defined]
    connection.settings_dict["NAME"] = name


def _migrate() -> list[str]:
    """Bring the restored database up to date. Returns what was applied; raises BackupError when a migration fails."""
    before = _applied()
    try:
        call_command("migrate", interactive=False, verbosity=0)
    except Exception as error:
        raise BackupError(f"A migration failed on the restored data, and nothing was changed: {error}") from error
    return sorted(_applied() - before)


def _applied() -> set[str]:
    with connections["default"].cursor() as cursor:
        cursor.execute("SELECT app, name FROM django_migrations")
        return {f"{app}.{name}" for app, name in cursor.fetchall()}


def _settle(archive: Archive, url: str, made_at: datetime, what: str, nothing_since: bool, done: Restored) -> None:
    done.runs = archive.manifest["rows"].get("public.runs_run", 0)
    if nothing_since:
        post_restore.note(what, made_at, nothing_since=True)
        return
    done.attempts_ended = post_restore.settle(made_at, what)
    with psycopg.connect(url, autocommit=True) as connection:
        post_restore.skip_numbers(connection)


def _keys(archive: Archive, brought: keys.Keys | None, home: Path, stamp: str, done: Restored) -> None:
    """After the swap, so that a restore that fails changes no key; so what fails here is told and no failure of the restore."""
    told = archive.manifest["keys"]
    if brought is not None:
        try:
            done.keys = keys.put_back(brought, home, stamp)
        except OSError as error:
            done.keys = [
                f"THE KEYS ARE NOT PUT BACK: {error.filename or home}: {error.strerror}. They stand in the backup's member "
                f"{keys.MEMBER}; put them into OPPO_HOME yourself, or restore again with --replace."
            ]
    elif keys.keys_here().fingerprints()[keys.SECRET_KEY] != told.get(keys.SECRET_KEY):
        done.keys = [
            "The secret key here is not the one of the backup: API tokens are void, and every worker must join again. "
            "Put the old OPPO_HOME/secret_key (or OPPO_SECRET_KEY) back to keep them."
        ]
    done.sealed_for_ever = post_restore.sealed_for_ever()
    point_django(connections["default"].settings_dict["NAME"])
