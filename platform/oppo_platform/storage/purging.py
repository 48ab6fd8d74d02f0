"""Deleting runs for good, bit by bit, when their days in the trash are over.

    due → purged_at (nothing more is taken for it) → rows in batches → what is left is a line

Guarantees. Every batch is a transaction of its own with at most `batches.MOST_ROWS` rows of a run that nothing is told of any
more, so nobody's events ever wait for it. Two housekeepers do not meet at a run, by a lock for each. A process that dies leaves
whole batches; the next round goes on. The line that is left, the run without its spec and its figures, keeps attempts and
allocations, so that what was used goes on counting for fair shares; it goes too after `OPPO_TOMBSTONE_DAYS`.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, QuerySet

from oppo_platform import clock
from oppo_platform.runs.models import Run
from oppo_platform.storage.artifact_deletion import ask_for_run
from oppo_platform.storage.bulk_delete import EVERYTHING, delete_batch
from oppo_platform.storage.models import Deletion
from oppo_platform.telemetry.models import Block, Decision, HotPoints, LogLine, SampleRow, Series, SpanBatch

TABLES = (HotPoints, Block, Series, SpanBatch, SampleRow, LogLine, Decision)
MOST_BATCHES = 50  # a round: ten seconds, say; retention and folders have their turn in between
# A run without these is a line.
EMPTY = {"spec": {}, "latest": {}, "bubble": None, "tags": [], "error": "", "reason": "", "last_log_lines": []}


def purge() -> int:
    """One round: goes on with deletions that are due. Returns how many rows were deleted."""
    deleted, left = 0, MOST_BATCHES
    due = list(_due().values_list("run_id", flat=True)[:MOST_BATCHES])
    for run_id in due:
        if not begin(run_id):
            continue
        while rows := delete_batch(run_id, EVERYTHING):
            Deletion.objects.filter(pk=run_id).update(rows=F("rows") + rows)
            deleted, left = deleted + rows, left - 1
            if left <= 0:
                return deleted
        if rows == 0:
            _leave_a_line(run_id)
    if due:
        vacuum()
    forget_lines()
    return deleted


@transaction.atomic
def begin(run_id: int) -> bool:
    """From now on nothing is taken for the run, and its folders are asked for. False: it is not to be deleted (any more)."""
    run = Run.objects.select_for_update(of=("self",)).select_related("project").get(pk=run_id)
    if not _due().filter(pk=run_id).exists():
        return False
    if run.purged_at is None:
        ask_for_run(run)  # before the rows of its checkpoints and launches go
        Run.objects.filter(pk=run_id).update(purged_at=clock.now())
    return True


def forget_lines() -> int:
    """Delete the lines of runs that were purged long ago. Returns how many."""
    before = clock.now() - timedelta(days=settings.OPPO_TOMBSTONE_DAYS)
    old = Deletion.objects.filter(ended_at__lt=before).order_by("run_id").values_list("run_id", flat=True)[:100]
    forgotten = 0
    for run_id in list(old):
        with transaction.atomic():
            forgotten += Run.objects.filter(pk=run_id).delete()[0] > 0
    return forgotten


def _due() -> QuerySet[Deletion]:
    return Deletion.objects.filter(due_at__lte=clock.now(), ended_at__isnull=True).order_by("due_at", "run_id")


@transaction.atomic
def _leave_a_line(run_id: int) -> None:
    Run.objects.filter(pk=run_id).update(**EMPTY)
    Deletion.objects.filter(pk=run_id, ended_at__isnull=True).update(ended_at=clock.now())


def vacuum() -> None:
    """Make the space of deleted rows usable again, but for tables that are being vacuumed already. Outside transactions only.

    PostgreSQL reuses the space within its table and seldom gives it back to the disk (docs/storage.md).
    """
    with connection.cursor() as cursor:
        for model in TABLES:
            cursor.execute(f"VACUUM (SKIP_LOCKED, ANALYZE) {connection.ops.quote_name(model._meta.db_table)}")
