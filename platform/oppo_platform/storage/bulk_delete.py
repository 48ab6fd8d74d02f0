"""Deleting what a run has told, some rows at a time, each time in a transaction of its own.

The run's row is not locked meanwhile, because ingest takes it after a producer's, which may be deleted here. Two who delete do
not meet, by a lock for each run; neither do they and a sealer, or who measures what the run takes.
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
MOST_ROWS = 2000  # a transaction

Rows = Callable[[int], QuerySet[models.Model]]
DETAIL: tuple[Rows, ...] = (
    lambda run_id: SpanBatch.objects.filter(attempt__in=_attempts(run_id)),
    lambda run_id: SampleRow.objects.filter(attempt__in=_attempts(run_id)),
    lambda run_id: LogLine.objects.filter(attempt__in=_attempts(run_id)),
)
# In this order: what refers to others goes first.
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
    """Delete some of a run's rows. Returns how many, 0 when none is left; None when somebody else is at this run."""
    if not _lock("pg_try_advisory_xact_lock", run_id):
        return None
    for attempt_id in _attempts(run_id).values_list("pk", flat=True):
        lock_compaction(attempt_id)
    for rows in tables:
        some = rows(run_id)
        ids = list(some.order_by("pk").values_list("pk", flat=True)[:MOST_ROWS])
        if ids:
            return some.model._default_manager.filter(pk__in=ids).delete()[0]
    return 0


def hold_off_deletion(run_id: int) -> bool:
    """Until the transaction ends nothing of the run is deleted here. False: somebody is at it right now."""
    return _lock("pg_try_advisory_xact_lock_shared", run_id)


def _lock(how: str, run_id: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {how}(%s, %s)", [LOCK_SPACE, run_id % 2**31])
        return bool(cursor.fetchone()[0])


def _attempts(run_id: int) -> QuerySet[Attempt]:
    return Attempt.objects.filter(run=run_id).order_by("pk")


def _series(run_id: int) -> QuerySet[Series]:
    return Series.objects.filter(attempt__in=_attempts(run_id))
