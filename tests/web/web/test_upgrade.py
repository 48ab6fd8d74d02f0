"""An upgrade keeps what was stored in the shapes of before."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from typing import Any

import psycopg
import pytest

from oppo_platform.telemetry.blocks import unpack_points

NAME = "upgraded"
CHUNK = (
    "INSERT INTO telemetry_serieschunk (attempt_id, key, first_step, last_step, steps, values) VALUES (%s, %s, %s, %s, %s, %s)"
)
AXES = "INSERT INTO telemetry_stepaxis (attempt_id, step, elapsed_s, generated_tokens, device_seconds) VALUES (1, %s, %s, %s, %s)"
HOT = """
    SELECT s.attempt_id, s.key, h.data FROM telemetry_hotpoints h JOIN telemetry_series s ON s.id = h.series_id
    ORDER BY s.attempt_id, s.key, h.id
"""
EMPTY = {"text": "''", "character varying": "''", "jsonb": "'{}'", "timestamp with time zone": "'2026-01-01'"}
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
    environ = os.environ | {"DATABASE_URL": url, "OPPO_HOME": str(home), "DJANGO_SETTINGS_MODULE": "oppo_platform.settings"}
    subprocess.run([sys.executable, "-m", "oppo_cli", "manage", "migrate", "-v0", *target], env=environ, check=True)


def stand_in(connection: Any, attempt: int) -> None:
    """A row of an attempt with nothing in it."""
    columns = connection.execute(NEEDED, ("runs_attempt",)).fetchall()
    values = [str(attempt) if name in ("id", "epoch") else EMPTY.get(kind, "'0'") for name, kind in columns]
    connection.execute(f"INSERT INTO runs_attempt ({', '.join(name for name, _ in columns)}) VALUES ({', '.join(values)})")
