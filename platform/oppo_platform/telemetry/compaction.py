"""Compaction: an attempt's hot points become blocks with a pyramid.

Guarantees: no point is lost or duplicated under concurrent reads and writes. Exactly the compacted points are deleted, in the
same transaction; readers see both states in one statement (`telemetry.metric_reader`). Of several points of one step the last to
arrive is kept, even if an earlier one is already in a block: such blocks are rewritten. A lock per attempt excludes concurrent
compaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q

from oppo_platform.runs.models import LIVE_ATTEMPT
from oppo_platform.telemetry import blocks
from oppo_platform.telemetry.models import Block, HotPoints, ProducerMark, Series

LOCK_SPACE = 0x5EA1
ENGINE = "engine"  # the producer of steps
MOST_ROWS = 50_000  # per transaction; the rest follows in the next one


def attempts_to_compact() -> list[int]:
    """Attempts with at least OPPO_SEAL_EVENTS new events, and ended attempts with any."""
    enough = Q(high_water__gte=F("sealed") + settings.OPPO_SEAL_EVENTS)
    over = ~Q(attempt__state__in=LIVE_ATTEMPT) & Q(high_water__gt=F("sealed"))
    marks = ProducerMark.objects.filter(enough | over, producer=ENGINE)
    return list(marks.order_by("attempt_id").values_list("attempt_id", flat=True))


def compact(attempt_id: int) -> int:
    """Compact the hot points of an attempt. Returns the number of points; 0 if another process is compacting it."""
    compacted = 0
    while True:
        points, more = _compact_batch(attempt_id)
        compacted += points
        if not more:
            return compacted


@transaction.atomic
def _compact_batch(attempt_id: int) -> tuple[int, bool]:
    """(points compacted, whether there may be more)."""
    if not _try_lock(attempt_id):
        return 0, False
    # Read before the points: points that arrive in between are compacted now and checked again.
    mark = ProducerMark.objects.filter(attempt_id=attempt_id, producer=ENGINE).first()
    rows = HotPoints.objects.filter(series__attempt_id=attempt_id).order_by("id")[:MOST_ROWS]
    hot, taken = defaultdict(list), []
    for row_id, series_id, data in rows.values_list("id", "series_id", "data"):
        hot[series_id].append(blocks.unpack_points(data))
        taken.append(row_id)
    for series in Series.objects.filter(pk__in=hot):
        _compact_series(series, hot[series.pk])
    HotPoints.objects.filter(pk__in=taken).delete()
    more = len(taken) == MOST_ROWS
    if mark is not None and not more:
        ProducerMark.objects.filter(pk=mark.pk).update(sealed=mark.high_water)
    return sum(len(steps) for parts in hot.values() for steps, _ in parts), more


def lock_compaction(attempt_id: int) -> None:
    """Wait until no other process compacts the attempt, and exclude it until the transaction ends."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, %s)", [LOCK_SPACE, attempt_id % 2**31])


def _try_lock(attempt_id: int) -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_SPACE, attempt_id % 2**31])
        return bool(cursor.fetchone()[0])


def _compact_series(series: Series, hot: Sequence[tuple[blocks.Steps, blocks.Values]]) -> None:
    first_step = min(int(steps.min()) for steps, _ in hot)
    # Blocks that overlap hot points, and the last one while it has room.
    last = Block.objects.filter(series=series).order_by("-first_step").first()
    unfilled = [last.pk] if last is not None and last.count < blocks.POINTS_A_BLOCK else []
    rows = Block.objects.filter(series=series).filter(Q(last_step__gte=first_step) | Q(pk__in=unfilled))
    opened = list(rows.order_by("first_step"))
    parts = [blocks.unpack_block(b.first_step, b.stride, b.points) for b in opened] + list(hot)
    steps, values = blocks.sort_by_step(np.concatenate([s for s, _ in parts]), np.concatenate([v for _, v in parts]))
    Block.objects.filter(pk__in=[block.pk for block in opened]).delete()
    edges = [*range(0, len(steps), blocks.POINTS_A_BLOCK), len(steps)]
    Block.objects.bulk_create(_block(series, steps[a:b], values[a:b]) for a, b in pairwise(edges))
    series.points += len(steps) - sum(block.count for block in opened)
    series.last_step = max(series.last_step, int(steps[-1]))
    series.first_step = min(series.first_step, int(steps[0])) if series.points > len(steps) else int(steps[0])
    series.save(update_fields=["points", "first_step", "last_step"])


def _block(series: Series, steps: blocks.Steps, values: blocks.Values) -> Block:
    stride, data = blocks.pack_block(steps, values)
    fine, coarse, whole = blocks.pyramid(steps, values)
    return Block(
        series=series, first_step=int(steps[0]), last_step=int(steps[-1]), count=len(steps), stride=stride, points=data,
        fine=fine.tobytes(), coarse=coarse.tobytes(), whole=whole.tobytes(),
    )  # fmt: skip
