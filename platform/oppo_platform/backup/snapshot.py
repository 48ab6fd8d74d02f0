"""A database snapshot: counts for the manifest, and an exported name for pg_dump (`pg_export_snapshot`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from oppo_platform.backup import BackupError, BackupRefused
from oppo_platform.backup.checkpoint_locks import Opened, deletion_locked, open_resume_checkpoints
from oppo_platform.runs.models import LIVE_ATTEMPT, Checkpoint

TABLES: LiteralString = """
    SELECT schemaname, tablename FROM pg_tables
     WHERE schemaname NOT LIKE 'pg\\_%' AND schemaname <> 'information_schema' ORDER BY 1, 2
"""
# Every column with a sequence.
NUMBERED: LiteralString = """
    SELECT t.schemaname, t.tablename, a.attname, pg_get_serial_sequence(format('%I.%I', t.schemaname, t.tablename), a.attname)
      FROM pg_tables t
      JOIN pg_attribute a ON a.attrelid = format('%I.%I', t.schemaname, t.tablename)::regclass
     WHERE a.attnum > 0 AND NOT a.attisdropped AND t.schemaname NOT LIKE 'pg\\_%' AND t.schemaname <> 'information_schema'
       AND pg_get_serial_sequence(format('%I.%I', t.schemaname, t.tablename), a.attname) IS NOT NULL
     ORDER BY 1, 2, 3
"""
CHECKPOINTS: LiteralString = """
    SELECT id, run_id, attempt_id, step, url, bytes, manifest_sha256, registered_at FROM runs_checkpoint ORDER BY id
"""
LIVE: LiteralString = "SELECT count(*) FROM runs_attempt WHERE state = ANY(%s)"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A database at one instant. Other sessions can use `name` while the snapshot is held."""

    name: str
    at: datetime
    server_version: str  # "18.6"
    bytes: int
    migrations: dict[str, list[str]]  # app → names, in the order in which they were applied
    rows: dict[str, int]  # "public.runs_run" → rows
    numbered_by_hand: list[str]  # `table.column` with explicit ids: tables of one row
    live_attempts: int
    checkpoints: list[Checkpoint]
    opened: Opened = field(default_factory=dict)  # open files, which runs may delete meanwhile


@contextmanager
def hold_snapshot(url: str, *, with_files: bool = False) -> Iterator[Snapshot]:
    """Hold a snapshot of a database; writers do not wait for it.

    Args:
        url: of the database.
        with_files: open the files of checkpoints that live runs would resume from.

    Raises:
        BackupRefused: the server or database cannot be reached, or has no platform.
        BackupError: the database fails.
    """
    try:
        connection = psycopg.connect(url, connect_timeout=10)
    except psycopg.OperationalError as error:
        raise BackupRefused(f"The database cannot be reached: {str(error).strip()}") from error
    with connection, ExitStack() as files:
        connection.isolation_level, connection.read_only = psycopg.IsolationLevel.REPEATABLE_READ, True
        try:
            yield _take(connection, files if with_files else None)
        except psycopg.errors.UndefinedTable as error:
            raise BackupRefused("There is no platform in this database: `oppo migrate` has never been run on it.") from error
        except psycopg.Error as error:
            raise BackupError(f"The database failed: {str(error).strip()}") from error


def _take(connection: psycopg.Connection[Any], files: ExitStack | None) -> Snapshot:
    if files is None:
        return _build(connection, *_begin(connection), {})
    with deletion_locked(connection) as runs:
        begun = _begin(connection)
        opened = open_resume_checkpoints(connection, runs, begun[-1], files)
    return _build(connection, *begun, opened)


def _begin(connection: psycopg.Connection[Any]) -> tuple[str, datetime, int, list[Checkpoint]]:
    """Start the snapshot: its name, its time, the database's bytes, and every checkpoint."""
    for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(sql.SQL("SET LOCAL {} = 0").format(sql.Identifier(limit)))
    name, at, size = connection.execute(
        "SELECT pg_export_snapshot(), clock_timestamp(), pg_database_size(current_database())"
    ).fetchone()  # type: ignore[misc]
    with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        checkpoints = [Checkpoint(**row) for row in cursor.execute(CHECKPOINTS).fetchall()]
    return name, at.astimezone(UTC), size, checkpoints


def _build(
    connection: psycopg.Connection[Any], name: str, at: datetime, size: int, checkpoints: list[Checkpoint], opened: Opened
) -> Snapshot:
    migrations: dict[str, list[str]] = {}
    for app, migration in connection.execute("SELECT app, name FROM django_migrations ORDER BY id"):
        migrations.setdefault(app, []).append(migration)
    return Snapshot(
        name=name,
        at=at,
        server_version="{}.{}".format(*divmod(connection.info.server_version, 10000)),
        bytes=size,
        migrations=migrations,
        rows=row_counts(connection),
        numbered_by_hand=sequences_behind(connection),
        live_attempts=connection.execute(LIVE, [list(LIVE_ATTEMPT)]).fetchone()[0],  # type: ignore[index]
        checkpoints=checkpoints,
        opened=opened,
    )


def row_counts(connection: psycopg.Connection[Any]) -> dict[str, int]:
    """Rows of every table, by `schema.table`."""
    counts = {}
    for schema, table in connection.execute(TABLES).fetchall():
        counted = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(schema, table)))
        counts[f"{schema}.{table}"] = counted.fetchone()[0]  # type: ignore[index]
    return counts


def sequences_behind(connection: psycopg.Connection[Any]) -> list[str]:
    """`table.column` whose sequence would return a number that is already used."""
    behind = []
    for schema, table, column, sequence in connection.execute(NUMBERED).fetchall():
        query = sql.SQL("SELECT (SELECT max({}) FROM {}), pg_sequence_last_value({}::regclass)")
        highest, last = connection.execute(
            query.format(sql.Identifier(column), sql.Identifier(schema, table), sql.Literal(sequence))
        ).fetchone()  # type: ignore[misc]
        if highest is not None and (last is None or last < highest):
            behind.append(f"{table}.{column}")
    return behind
