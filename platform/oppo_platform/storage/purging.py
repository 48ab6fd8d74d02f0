"""Permanent deletion of runs in batches, after their time in the trash.

    due → purged_at (ingest refuses its events) → rows in batches → a tombstone

Guarantees. Every batch is a transaction of its own with at most `bulk_delete.BATCH_ROWS` rows, so ingest of other runs does not
wait for it. A lock per run excludes concurrent housekeepers. After a crash the next round continues. The tombstone, the run
without spec and metrics, retains attempts and allocations for the accounting of fair shares; it is deleted after
`OPPO_TOMBSTONE_DAYS`.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, QuerySet

from oppo_platform import clock
from oppo_platform.runs.models import Run
from oppo_platform.storage.artifact_deletion import request_run_deletion
from oppo_platform.storage.bulk_delete import EVERYTHING, delete_batch
from oppo_platform.storage.models import Deletion
from oppo_platform.telemetry.models import Block, Decision, HotPoints, LogLine, SampleRow, Series, SpanBatch

TABLES = (HotPoints, Block, Series, SpanBatch, SampleRow, LogLine, Decision)
MOST_BATCHES = 50  # per round, about ten seconds
# Fields of a tombstone.
EMPTY = {"spec": {}, "latest": {}, "bubble": None, "tags": [], "error": "", "reason": "", "last_log_lines": []}


def purge() -> int:
    """One round of due deletions. Returns the number of deleted rows."""
    deleted, left = 0, MOST_BATCHES
    due = list(_due().values_list("run_id", flat=True)[:MOST_BATCHES])
    for run_id in due:
        if not _start_purge(run_id):
            continue
        while rows := delete_batch(run_id, EVERYTHING):
            Deletion.objects.filter(pk=run_id).update(rows=F("rows") + rows)
            deleted, left = deleted + rows, left - 1
            if left <= 0:
                return deleted
        if rows == 0:
            _make_tombstone(run_id)
    if due:
        vacuum()
    _delete_old_tombstones()
    return deleted


@transaction.atomic
def _start_purge(run_id: int) -> bool:
    """Refuse further events of the run and request deletion of its folders. False: it is not due, for example restored."""
    run = Run.objects.select_for_update(of=("self",)).select_related("project").get(pk=run_id)
    if not _due().filter(pk=run_id).exists():
        return False
    if run.purged_at is None:
        request_run_deletion(run)  # needs the rows of its checkpoints and launches
        Run.objects.filter(pk=run_id).update(purged_at=clock.now())
    return True


def _delete_old_tombstones() -> None:
    before = clock.now() - timedelta(days=settings.OPPO_TOMBSTONE_DAYS)
    old = Deletion.objects.filter(ended_at__lt=before).order_by("run_id").values_list("run_id", flat=True)[:100]
    for run_id in list(old):
        Run.objects.filter(pk=run_id).delete()


def _due() -> QuerySet[Deletion]:
    return Deletion.objects.filter(due_at__lte=clock.now(), ended_at__isnull=True).order_by("due_at", "run_id")


@transaction.atomic
def _make_tombstone(run_id: int) -> None:
    Run.objects.filter(pk=run_id).update(**EMPTY)
    Deletion.objects.filter(pk=run_id, ended_at__isnull=True).update(ended_at=clock.now())


def vacuum() -> None:
    """Make the space of deleted rows reusable within their tables (docs/storage.md). Outside transactions only."""
    with connection.cursor() as cursor:
        for model in TABLES:
            cursor.execute(f"VACUUM (SKIP_LOCKED, ANALYZE) {connection.ops.quote_name(model._meta.db_table)}")
