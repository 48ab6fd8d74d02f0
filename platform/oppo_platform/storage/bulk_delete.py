"""Deletes a run's telemetry rows in batches, each in a transaction of its own.

Per-run advisory locks exclude concurrent deletion, compaction and usage measurement. The run's row is not locked, because ingest
locks it after a producer's row, which may be deleted here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from django.db import connection, models, transaction
from django.db.models import QuerySet

from oppo_platform.alerts.models import Alert
from oppo_platform.runs.models import Attempt, Change, Checkpoint, Transition
from oppo_platform.storage.models import RunStorage
from oppo_platform.telemetry.compaction import lock_compaction
from oppo_platform.telemetry.models import Block, Decision, HotPoints, LogLine, ProducerMark, SampleRow, Series, SpanBatch

LOCK_SPACE = 0xDE1E
BATCH_ROWS = 2000

Rows = Callable[[int], QuerySet[models.Model]]
DETAIL: tuple[Rows, ...] = (
    lambda run_id: SpanBatch.objects.filter(attempt__in=_attempts(run_id)),
    lambda run_id: SampleRow.objects.filter(attempt__in=_attempts(run_id)),
    lambda run_id: LogLine.objects.filter(attempt__in=_attempts(run_id)),
)
# Ordered by foreign keys: referring rows first.
EVERYTHING: tuple[Rows, ...] = (
    lambda run_id: HotPoints.objects.filter(series__in=_series(run_id)),
    lambda run_id: Block.objects.filter(series__in=_series(run_id)),
    lambda run_id: Series.objects.filter(attempt__in=_attempts(run_id)),
    *DETAIL,
    lambda run_id: Decision.objects.filter(attempt__in=_attempts(run_id)),
    lambda run_id: ProducerMark.objects.filter(attempt__in=_attempts(run_id)),
    lambda run_id: Checkpoint.objects.filter(run=run_id),
    lambda run_id: RunStorage.objects.filter(run=run_id),
    lambda run_id: Alert.objects.filter(run=run_id),
    lambda run_id: Change.objects.filter(run=run_id),
    lambda run_id: Transition.objects.filter(run=run_id),
)


@transaction.atomic
def delete_batch(run_id: int, tables: Sequence[Rows]) -> int | None:
    """Delete some of a run's rows. Returns their number, 0 when none is left; None if another process holds the run's lock."""
    if not _lock("pg_try_advisory_xact_lock", run_id):
        return None
    for attempt_id in _attempts(run_id).values_list("pk", flat=True):
        lock_compaction(attempt_id)
    for rows in tables:
        query = rows(run_id)
        ids = list(query.order_by("pk").values_list("pk", flat=True)[:BATCH_ROWS])
        if ids:
            return query.model._default_manager.filter(pk__in=ids).delete()[0]
    return 0


def lock_out_deletion(run_id: int) -> bool:
    """Exclude batch deletion of the run until the transaction ends. False: a batch is being deleted."""
    return _lock("pg_try_advisory_xact_lock_shared", run_id)


def _lock(function: str, run_id: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {function}(%s, %s)", [LOCK_SPACE, run_id % 2**31])
        return bool(cursor.fetchone()[0])


def _attempts(run_id: int) -> QuerySet[Attempt]:
    return Attempt.objects.filter(run=run_id).order_by("pk")


def _series(run_id: int) -> QuerySet[Series]:
    return Series.objects.filter(attempt__in=_attempts(run_id))
