"""An upgrade keeps what was stored in the shapes of before."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from typing import Any

import psycopg
import pytest
from django.core.management import call_command

from oppo_platform.telemetry.blocks import unpack_points

NAME = "upgraded"
# The newest migrations before projects and allocations changed their apps.
THEN = {"runs": "0011", "scheduling": "0006", "cluster": "0004", "accounts": "0005"}
CHUNK = (
    "INSERT INTO telemetry_serieschunk (attempt_id, key, first_step, last_step, steps, values) VALUES (%s, %s, %s, %s, %s, %s)"
)
AXES = "INSERT INTO telemetry_stepaxis (attempt_id, step, elapsed_s, generated_tokens, device_seconds) VALUES (1, %s, %s, %s, %s)"
HOT = """
    SELECT s.attempt_id, s.key, h.data FROM telemetry_hotpoints h JOIN telemetry_series s ON s.id = h.series_id
    ORDER BY s.attempt_id, s.key, h.id
"""
EMPTY = {"ARRAY": "'{}'", "text": "''", "character varying": "''", "jsonb": "'{}'", "timestamp with time zone": "'2026-01-01'"}
NEEDED = "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = %s AND is_nullable = 'NO'"


@pytest.mark.full
def test_series_stored_in_chunks_are_hot_points_afterwards(database_url: str, tmp_path: Any) -> None:
    with psycopg.connect(database_url, autocommit=True) as server:
        server.execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
        server.execute(f"CREATE DATABASE {NAME}")
    url = database_url.rpartition("/")[0] + f"/{NAME}"
    migrate(url, tmp_path, "telemetry", "0002")
    with psycopg.connect(url) as old:
        old.execute("SET session_replication_role = replica")  # attempts without their runs
        for attempt in (1, 2):
            stand_in(old, attempt)
        for attempt, steps, values in ((1, [1, 2], [0.5, float("nan")]), (1, [3], [1.5]), (2, [2], [9.0])):
            packed = struct.pack(f"<{len(steps)}i", *steps), struct.pack(f"<{len(values)}d", *values)
            old.execute(CHUNK, (attempt, "m", steps[0], steps[-1], *packed))
        for step in (1, 2, 3):
            old.execute(AXES, (step, 1.5 * step, 64 * step, 3.0 * step))
    migrate(url, tmp_path)
    with psycopg.connect(url) as new:
        rows = new.execute(HOT).fetchall()
    told = [(attempt, key, *(column.tolist() for column in unpack_points(data))) for attempt, key, data in rows]
    steps = [1, 2, 3]
    axes = {"@gpu_seconds": [3.0, 6.0, 9.0], "@tokens": [64.0, 128.0, 192.0], "@wall": [1.5, 3.0, 4.5]}
    metrics = [(1, "m", [1, 2], [0.5, float("nan")]), (1, "m", [3], [1.5]), (2, "m", [2], [9.0])]
    assert str(told) == str([*((1, key, steps, values) for key, values in axes.items()), *metrics])  # as text: NaN equals itself


def migrate(url: str, home: Any, *target: str) -> None:
    """As `oppo manage migrate` does."""
    manage(url, home, "migrate", "-v0", *target)


def manage(url: str, home: Any, *command: str) -> str:
    """As `oppo manage` does; what it has printed."""
    environ = os.environ | {"DATABASE_URL": url, "OPPO_HOME": str(home), "DJANGO_SETTINGS_MODULE": "oppo_platform.settings"}
    command = (sys.executable, "-m", "oppo_cli", "manage", *command)
    return subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


def stand_in(connection: Any, attempt: int) -> None:
    """A row of an attempt with nothing in it."""
    insert(connection, "runs_attempt", id=attempt, epoch=attempt)


def insert(connection: Any, table: str, **given: Any) -> None:
    """A row with what is given, and nothing in its other columns."""
    values = {name: EMPTY.get(kind, "'0'") for name, kind in connection.execute(NEEDED, (table,)).fetchall()}
    values |= {name: f"'{value}'" for name, value in given.items()}
    connection.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join(values.values())})")


# What an installation of before has, and how it is read afterwards.
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("accounts_team", {"id": 5, "name": "poets"}),
    ("runs_project", {"id": 7, "team_id": 5, "name": "poems", "pinned_id": 9}),
    ("runs_run", {"id": 9, "project_id": 7, "name": "first", "priority": 50}),
    ("runs_attempt", {"id": 3, "run_id": 9}),
    ("cluster_device", {"id": 4, "index": 2}),
    ("scheduling_allocation", {"id": 6, "attempt_id": 3, "device_id": 4}),
]
READ = """
from oppo_platform.projects.models import Project
from oppo_platform.runs.models import Allocation
project, held = Project.objects.get(), Allocation.objects.get()
print(project.team.name, project.name, project.pinned.name, held.attempt.run.project.pk, held.device.index)
Project.objects.create(team=project.team, name="more", created_at=project.created_at)
print(Project.objects.latest("pk").pk > 7)
"""


@pytest.mark.full
def test_projects_and_allocations_stay_where_they_are_when_their_apps_change(database_url: str, tmp_path: Any) -> None:
    with psycopg.connect(database_url, autocommit=True) as server:
        server.execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
        server.execute(f"CREATE DATABASE {NAME}")
    url = database_url.rpartition("/")[0] + f"/{NAME}"
    for app, newest in THEN.items():
        migrate(url, tmp_path, app, newest)
    with psycopg.connect(url) as old:
        old.execute("SET session_replication_role = replica")  # without users and nodes
        for table, given in ROWS:
            insert(old, table, **given)
        old.execute("SELECT setval('runs_project_id_seq', 7)")
        cursors = [old.execute(f"SELECT * FROM {table}") for table, _ in ROWS]
        columns = [", ".join(f'"{column.name}"' for column in cursor.description or ()) for cursor in cursors]
        before = [cursor.fetchall() for cursor in cursors]
    migrate(url, tmp_path)
    with psycopg.connect(url) as new:
        kept = [new.execute(f"SELECT {names} FROM {table}").fetchall() for names, (table, _) in zip(columns, ROWS, strict=True)]
        assert kept == before
    assert manage(url, tmp_path, "shell", "-v0", "-c", READ).splitlines() == ["poets poems first 7 2", "True"]


@pytest.mark.django_db
def test_the_models_are_as_the_migrations_say() -> None:
    call_command("makemigrations", check_changes=True, dry_run=True)
