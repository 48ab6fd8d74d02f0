"""Estimates the disk usage of runs and teams, in the housekeeper.

Log lines, samples and timelines are counted incrementally, from the marks of the last measurement. The newest step of a running
run is left for the next measurement, because it may be incomplete. Blocks, which compaction rewrites, are counted again each
time. Checkpoints count with their registered size while their files exist, as far as is visible from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Max, OuterRef, Q, Subquery, Sum
from django.db.models.functions import Coalesce

from oppo_contract.states import ENDED
from oppo_platform import clock
from oppo_platform.accounts.models import Team
from oppo_platform.runs.checkpoints import files_readable
from oppo_platform.runs.models import Attempt, Checkpoint, Run
from oppo_platform.storage.bulk_delete import lock_out_deletion
from oppo_platform.storage.models import RunStorage, TeamStorage

MAX_PER_ROUND = 200
OUT_OF_ORDER = 1000  # ids of runs that may be committed after later ones
NO_LIMIT = 2**31 - 1  # above every step
# Bytes of a row besides its large columns: header, small columns, and index entries; measured.
LINE_BYTES, ANSWER_BYTES, STEP_BYTES, BATCH_BYTES, BLOCK_BYTES, SERIES_BYTES = 160, 330, 190, 90, 260, 180

LOGS = """
    SELECT attempt_id, max(id), sum(pg_column_size(text)) + count(*) * %(row)s FROM telemetry_logline AS entry
      JOIN unnest(%(ids)s::bigint[], %(marks)s::bigint[]) AS mark(attempt, place) ON entry.attempt_id = mark.attempt
     WHERE entry.id > mark.place GROUP BY 1
"""
STEPS = """
    SELECT attempt_id, max(step), sum({size}) + count(*) * %(row)s FROM {table} AS entry
      JOIN unnest(%(ids)s::bigint[], %(marks)s::bigint[]) AS mark(attempt, place) ON entry.attempt_id = mark.attempt
     WHERE entry.step > mark.place AND entry.step <= %(until)s GROUP BY 1
"""
# By part: the query, and the bytes of a row besides its large columns.
INCREMENTAL = {
    "timeline": (STEPS.format(table="telemetry_spanbatch", size="pg_column_size(data) + pg_column_size(far)"), STEP_BYTES),
    "samples": (STEPS.format(table="telemetry_samplerow", size="pg_column_size(data) + pg_column_size(searched)"), ANSWER_BYTES),
    "logs": (LOGS, LINE_BYTES),
}
SERIES = """
    WITH mine AS (SELECT id FROM telemetry_series WHERE attempt_id = ANY(%(ids)s)),
         sizes AS (
             SELECT pg_column_size(data) + %(batch)s AS size FROM telemetry_hotpoints WHERE series_id IN (SELECT id FROM mine)
             UNION ALL
             SELECT pg_column_size(points) + pg_column_size(fine) + pg_column_size(coarse) + pg_column_size(whole) + %(block)s
               FROM telemetry_block WHERE series_id IN (SELECT id FROM mine))
    SELECT (SELECT count(*) * %(series)s FROM mine) + coalesce((SELECT sum(size) FROM sizes), 0)
"""


def measure_due_runs() -> int:
    """Measure runs that may have grown, then their teams. Returns the number of runs."""
    now = clock.now()
    newest = RunStorage.objects.aggregate(newest=Max("run_id"))["newest"] or 0
    unknown = Run.objects.filter(pk__gt=newest - OUT_OF_ORDER, storage__isnull=True, purged_at__isnull=True)
    due = Q(measured_at__lte=now - timedelta(seconds=settings.OPPO_MEASURE_S)) | Q(run__ended_at__gte=F("measured_at"))
    again = RunStorage.objects.filter(due, settled=False).order_by("measured_at").values_list("run_id", flat=True)
    run_ids = [*unknown.order_by("pk").values_list("pk", flat=True)[:MAX_PER_ROUND], *again[:MAX_PER_ROUND]]
    for run_id in run_ids:
        measure(run_id)
    if run_ids:
        update_team_totals()
    return len(run_ids)


def mark_changed(attempt_ids: Sequence[int]) -> None:
    """Measure the runs of these attempts again, also those that have ended, because new data arrived."""
    if attempt_ids:
        RunStorage.objects.filter(run__attempts__in=attempt_ids, settled=True).update(settled=False)


@transaction.atomic
def measure(run_id: int, *, recount: bool = False) -> None:
    """Count data since the last measurement; with `recount` all data, after a deletion.

    Skipped while rows of the run are being deleted, so that the row of a deleted run is not created again.
    """
    if not lock_out_deletion(run_id):
        return
    run = Run.objects.filter(pk=run_id, purged_at__isnull=True).first()
    if run is None:
        return
    RunStorage.objects.bulk_create([RunStorage(run=run, measured_at=clock.now())], ignore_conflicts=True)
    row = RunStorage.objects.select_for_update().get(run=run)
    if recount:
        row.marks, row.timeline, row.samples, row.logs = {}, 0, 0, 0
    ended = run.state in ENDED
    attempts = list(Attempt.objects.filter(run=run).values_list("pk", flat=True))
    if attempts:
        _count(row, attempts, NO_LIMIT if ended else run.step - 1)
    row.checkpoints = _checkpoints(run)
    row.settled, row.measured_at = ended, clock.now()
    row.save(update_fields=["series", "timeline", "samples", "logs", "checkpoints", "marks", "settled", "measured_at"])


def _count(row: RunStorage, attempts: list[int], until: int) -> None:
    """Count steps up to `until`."""
    with connection.cursor() as cursor:
        for part, (query, row_bytes) in INCREMENTAL.items():
            marks = row.marks.setdefault(part, {})
            places = [marks.get(str(attempt), 0) for attempt in attempts]
            cursor.execute(query, {"ids": attempts, "marks": places, "until": until, "row": row_bytes})
            for attempt, place, size in cursor.fetchall():
                marks[str(attempt)] = place
                setattr(row, part, getattr(row, part) + int(size))
        cursor.execute(SERIES, {"ids": attempts, "series": SERIES_BYTES, "batch": BATCH_BYTES, "block": BLOCK_BYTES})
        row.series = int(cursor.fetchone()[0])


def _checkpoints(run: Run) -> int:
    """Bytes of checkpoints with visible files. Where files are not visible: of the newest ones, as many as the run keeps."""
    options = run.spec.get("checkpoints", {})
    most = int(options.get("keep", 2)) + int(options.get("keep_best", 0))
    places = [(row.bytes, files_readable(row)) for row in Checkpoint.objects.filter(run=run).order_by("-step", "-id")]
    here = sum(size for size, place in places if place == "here")
    return here + sum([size for size, place in places if place == "elsewhere"][:most])


def update_team_totals() -> None:
    """Sum the usage of each team's runs, including those in the trash."""
    TeamStorage.objects.bulk_create(
        [TeamStorage(team=team) for team in Team.objects.filter(storage__isnull=True)], ignore_conflicts=True
    )
    used = RunStorage.objects.filter(run__project__team=OuterRef("team")).order_by().values("run__project__team")
    summed = Subquery(used.annotate(total=Sum("bytes")).values("total"))
    TeamStorage.objects.update(used_bytes=Coalesce(summed, 0), used_at=clock.now())
