"""Restores a backup: verify → check → fill a fresh database → migrate → invalidate stale state → swap.

The old database is renamed, not deleted. After a failure or a kill before the swap it is unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from django.conf import settings
from django.core.management import call_command
from django.db import connections
from django.db.migrations.loader import MigrationLoader

from oppo_platform.backup import BackupError, BackupRefused, checkpoint_files, keys, pg_tools, post_restore, snapshot
from oppo_platform.backup.archive import CHECKPOINTS, DATABASE, Archive, Report, check_complete
from oppo_platform.backup.create import Progress
from oppo_platform.backup.databases import Server


@dataclass(slots=True)
class Restored:
    """The report of a restore."""

    kept: str = ""  # new name of the previous database
    runs: int = 0
    attempts_ended: int = 0
    migrated: list[str] = field(default_factory=list)
    checkpoints_put_back: int = 0
    missing: post_restore.Missing = field(default_factory=lambda: post_restore.Missing([], 0, 0))
    held: list[str] = field(default_factory=list)  # runs that wait for files of checkpoints
    keys: list[str] = field(default_factory=list)
    undecryptable: list[str] = field(default_factory=list)


def check_migrations(manifest: dict[str, Any]) -> None:
    """Raises BackupRefused if the backup has migrations unknown to this version."""
    known = MigrationLoader(None).disk_migrations
    newer = [f"{app}.{name}" for app, names in manifest["migrations"].items() for name in names if (app, name) not in known]
    if newer:
        raise BackupRefused(
            f"The backup is newer than this installation (OPPO {manifest['platform_version']}; unknown here: "
            f"{', '.join(newer)}). Install that version or a later one, and restore with it."
        )


def check_runs(server: Server, replace: bool) -> None:
    """Raises BackupRefused if the database has runs and `replace` is false."""
    if replace or not server.exists():
        return
    with psycopg.connect(server.url, connect_timeout=10) as connection:
        has_table = connection.execute("SELECT to_regclass('runs_run') IS NOT NULL").fetchone()
        runs = connection.execute("SELECT count(*) FROM runs_run").fetchone() if has_table and has_table[0] else None
    if runs and runs[0]:
        raise BackupRefused(
            f"The database {server.name} has {runs[0]} runs, and nothing was changed. With --replace the backup takes its place; "
            "it is kept under another name."
        )


def restore(
    archive: Archive, server: Server, home: Path, what: str, report: Report, *, replace: bool, nothing_since: bool
) -> Restored:
    """Replace the platform's database by a verified backup. Django's connection then points to the result.

    Args:
        archive: open and verified.
        home: folder of the keys.
        what: the backup's name, for the audit log.
        replace: whether a database with runs may be replaced.
        nothing_since: nothing has happened since the backup: live attempts and sequences continue.

    Raises:
        BackupRefused: the request is refused. BackupError: the restore failed. The old database is unchanged in both cases.
    """
    included, tool = _check(archive, server, replace)
    done, listed = Restored(), json.loads(archive.read(CHECKPOINTS))
    made_at = datetime.fromisoformat(archive.manifest["made_at"])
    stamp = server.stamp_at(datetime.now(UTC))
    _report_former_roots(listed, report)
    with server.fresh() as name:
        _fill(archive, server.url_of(name), tool, report)
        try:
            point_django(name)
            report("Bringing it up to date …")
            done.migrated = _migrate()
            _invalidate(archive, server.url_of(name), made_at, what, nothing_since, done)
            checkpoint_files.move_to_present_root()
            done.checkpoints_put_back = checkpoint_files.restore_files(archive, listed, report)
            was_here = {entry["id"] for entry in listed if entry["files"] == "here"}
            done.missing = post_restore.missing_checkpoints(was_here)
            done.held = post_restore.hold_runs_without_files()
        finally:
            point_django(server.name)
        done.kept = server.swap(name, stamp)
    _restore_keys(archive, included, home, stamp, done)
    return done


def _check(archive: Archive, server: Server, replace: bool) -> tuple[keys.Keys | None, pg_tools.Program]:
    """The keys in the backup, if any, and the program to restore with. Raises BackupRefused."""
    check_complete(archive)
    check_migrations(archive.manifest)
    included = keys.parse_keys(archive.read(keys.MEMBER)) if archive.manifest["keys"].get("included") else None
    tool = _find_pg_restore(archive.manifest, server)
    server.check_rights()
    server.check_unused()
    check_runs(server, replace)
    return included, tool


def _report_former_roots(listed: list[dict[str, Any]], report: Report) -> None:
    """Say where the checkpoints were, and that files which are not in the backup have to be copied."""
    if roots := checkpoint_files.former_roots(listed):
        left = sum("members" not in entry for entry in listed)
        report(f"Its checkpoints were in {', '.join(roots)}; here they belong in {settings.OPPO_ARTIFACT_ROOT}.")
        report(f"Files of {left} are not in the backup: copy that folder's `runs` there. Runs whose files are missing are held.")


def _find_pg_restore(manifest: dict[str, Any], server: Server) -> pg_tools.Program:
    """A usable pg_restore. Raises BackupRefused if the server is older than the backup's."""
    made, wrote = (int(str(manifest[key]).split(".")[0]) for key in ("postgres", "pg_dump"))
    if server.major < made:
        raise BackupRefused(
            f"The backup is of PostgreSQL {made}, and this server is {server.major}: it needs that major version or a later one."
        )
    tool = pg_tools.find_program("pg_restore", server.major, at_least=wrote)
    if not pg_tools.is_compatible(tool, server.major):
        raise BackupRefused(
            f"pg_restore {tool.version} cannot fill a server of PostgreSQL {server.major}. Take one of {pg_tools.MIN_FOR_NEW} "
            f"or later; or install PostgreSQL's client programs, version {server.major}, and create the backup again with them."
        )
    return tool


def _fill(archive: Archive, url: str, tool: pg_tools.Program, report: Report) -> None:
    """Load the dump and compare row counts with the manifest. Raises BackupError if they differ."""
    report(f"Loading {archive.places[DATABASE][1]:,} bytes into a new database, with pg_restore {tool.version} …")
    progress: Callable[[bytes], None] = Progress("database", report, lambda piece: None)

    def pieces() -> Any:
        for piece in archive.pieces(DATABASE):
            yield piece
            progress(piece)

    pg_tools.load(tool, url, pieces())
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("ANALYZE")
        loaded, expected = snapshot.row_counts(connection), archive.manifest["rows"]
        wrong = [
            f"{table}: {loaded.get(table, 0)} rows, not {expected.get(table, 0)}"
            for table in sorted({*loaded, *expected})
            if loaded.get(table) != expected.get(table)
        ]
        if wrong:
            raise BackupError(f"What was loaded is not what was backed up, and nothing was changed: {'; '.join(wrong[:5])}.")
        if behind := set(snapshot.sequences_behind(connection)) - set(archive.manifest["numbered_by_hand"]):
            raise BackupError(f"Numbers of {', '.join(sorted(behind))} would be given twice, and nothing was changed.")


def point_django(name: str) -> None:
    """Point Django's connection to another database of the same server, and close all connections."""
    connection = connections["default"]
    connections.close_all()
    connection.close_pool()  # type: ignore[attr-defined]
    connection.settings_dict["NAME"] = name


def _migrate() -> list[str]:
    """Apply missing migrations. Returns their names; raises BackupError if one fails."""
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


def _invalidate(archive: Archive, url: str, made_at: datetime, what: str, nothing_since: bool, done: Restored) -> None:
    done.runs = archive.manifest["rows"].get("public.runs_run", 0)
    if nothing_since:
        post_restore.record_restore(what, made_at, nothing_since=True)
        return
    done.attempts_ended = post_restore.invalidate_stale_state(made_at, what)
    with psycopg.connect(url, autocommit=True) as connection:
        post_restore.advance_sequences(connection)


def _restore_keys(archive: Archive, included: keys.Keys | None, home: Path, stamp: str, done: Restored) -> None:
    """Restore keys after the swap, so that a failed restore changes none; errors are reported in `done.keys`."""
    if included is not None:
        try:
            done.keys = keys.restore_keys(included, home, stamp)
        except OSError as error:
            done.keys = [
                f"THE KEYS ARE NOT PUT BACK: {error.filename or home}: {error.strerror}. They stand in the backup's member "
                f"{keys.MEMBER}; put them into OPPO_HOME yourself, or restore again with --replace."
            ]
    elif keys.current_keys().fingerprints()[keys.SECRET_KEY] != archive.manifest["keys"].get(keys.SECRET_KEY):
        done.keys = [
            "The secret key here is not the one of the backup: API tokens are void, and every worker must join again. "
            "Put the old OPPO_HOME/secret_key (or OPPO_SECRET_KEY) back to keep them."
        ]
    done.undecryptable = post_restore.undecryptable()
    point_django(connections["default"].settings_dict["NAME"])
