"""Making the space of deleted rows usable again: PostgreSQL gives it back to its table, and seldom to the disk.

A table keeps the size that it once had, unless its end is empty; new rows go into the holes first. So deleting stops growth and
does not shrink the database: `docs/storage.md` says so, and what does.
"""

from __future__ import annotations

from django.db import connection

from oppo_platform.telemetry.models import Block, Decision, HotPoints, LogLine, SampleRow, Series, SpanBatch

TABLES = (HotPoints, Block, Series, SpanBatch, SampleRow, LogLine, Decision)


def vacuum() -> None:
    """Vacuum the tables of telemetry; one that somebody else is vacuuming is left to them. Outside transactions only."""
    with connection.cursor() as cursor:
        for model in TABLES:
            cursor.execute(f"VACUUM (SKIP_LOCKED, ANALYZE) {connection.ops.quote_name(model._meta.db_table)}")
