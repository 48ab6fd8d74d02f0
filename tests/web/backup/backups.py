"""Backups of the test's own database, and restores into another one of the same server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from django.db import connection
from psycopg import sql
from psycopg.conninfo import make_conninfo

from oppo_contract.safe_delete import file_url_path
from oppo_platform.backup.archive import open_archive
from oppo_platform.backup.create import Backup, create_backup
from oppo_platform.backup.databases import connect_server
from oppo_platform.backup.restore import Restored, point_django, restore
from oppo_platform.backup.snapshot import NUMBERED, TABLES
from oppo_platform.runs.attempts import artifact_url
from oppo_platform.runs.models import Run

TARGET = "put_back"
FILES = {"actor/model.safetensors": b"w" * 70_001, "state.json": b"{}", "empty": b""}


def url_of(database: str) -> str:
    """A database of the server that Django's connection leads to."""
    told = connection.settings_dict
    return make_conninfo(
        "", dbname=database, user=told["USER"], password=told["PASSWORD"], host=told["HOST"], port=str(told["PORT"])
    )


class Backups:
    """`made` from the present database; `restored` into `TARGET`, which Django's connection leads to inside `looking_at`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.here = connection.settings_dict["NAME"]
        self.home = folder / "home"
        self.home.mkdir()
        self.told: list[str] = []

    def made(self, database: str | None = None, **options: Any) -> Backup:
        """A backup."""
        name = f"{len(list(self.folder.glob('*.tar')))}.tar"
        return create_backup(url_of(database or self.here), self.folder / name, self.told.append, **options)

    def restored(self, file: Path, *, replace: bool = False, nothing_since: bool = False) -> Restored:
        """Put it back into the target; Django's connection leads to the test's own database again."""
        try:
            with open_archive(file, self.told.append) as archive, connect_server(url_of(TARGET)) as server:
                options = {"replace": replace, "nothing_since": nothing_since}
                return restore(archive, server, self.home, file.name, self.told.append, **options)
        finally:
            point_django(self.here)

    @contextmanager
    def looking_at(self, database: str = TARGET) -> Iterator[None]:
        """The platform works on another database meanwhile."""
        point_django(database)
        try:
            yield
        finally:
            point_django(self.here)

    def clear(self) -> None:
        """Drop what restores have made."""
        with psycopg.connect(url_of("postgres"), autocommit=True) as server:
            for (name,) in server.execute("SELECT datname FROM pg_database WHERE starts_with(datname, %s)", [TARGET]).fetchall():
                server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def databases() -> set[str]:
    """Names of all databases that begin as the target's."""
    with psycopg.connect(url_of("postgres")) as server:
        return {name for (name,) in server.execute("SELECT datname FROM pg_database").fetchall() if name.startswith(TARGET)}


def everything(database: str) -> dict[str, list[str]]:
    """Every row of every table as text, sorted, and every sequence's last number."""
    told = {}
    with psycopg.connect(url_of(database)) as looking:
        for schema, table in looking.execute(TABLES).fetchall():
            rows = looking.execute(sql.SQL("SELECT t::text FROM {} t").format(sql.Identifier(schema, table)))
            told[table] = sorted(row for (row,) in rows.fetchall())
        for _, table, column, sequence in looking.execute(NUMBERED).fetchall():
            last = looking.execute("SELECT pg_sequence_last_value(%s::regclass)::text", [sequence]).fetchone()
            told[f"{table}.{column}"] = [str(last[0])] if last else []
    return told


def save(worker: Any, run: Run, attempt_id: int, step: int) -> Path:
    """A checkpoint that is written and registered."""
    url = f"{artifact_url(run.pk)}/checkpoints/step-{step:08d}"
    folder = file_url_path(url)
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    text = json.dumps({n: {"sha256": hashlib.sha256(c).hexdigest(), "bytes": len(c)} for n, c in FILES.items()})
    (folder / "manifest.json").write_text(text)
    told = {"epoch": 1, "step": step, "url": url, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest(), "bytes": 70_003}
    assert worker.attempt(attempt_id, "checkpoints", told).status_code == 200
    return folder
