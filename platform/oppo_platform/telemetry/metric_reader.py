"""Reads series from blocks and hot rows at the requested resolution.

    attempt 1 ████████████▌            a run's attempts: the newer one counts from its first step on (`AttemptRange`)
    attempt 2             ▐█████████░░ ░ hot

One statement reads the requested pyramid level of each block, or its points if it must be cut: at the ends of the range, at a
newer attempt's first step, and where hot points repeat a step. It is one statement because compaction moves points concurrently.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import psycopg
from django.db import connection
from django.db.models import QuerySet

from oppo_platform.runs.models import Attempt, Run
from oppo_platform.telemetry import blocks
from oppo_platform.telemetry.blocks import Buckets, Steps, Values
from oppo_platform.telemetry.models import Block, HotPoints, Series

Level = Literal["points", "fine", "coarse", "whole"]
Points = tuple[Steps, Values]
LEVELS: tuple[tuple[Level, int], ...] = (("whole", blocks.POINTS_A_BLOCK), ("coarse", blocks.COARSE), ("fine", blocks.FINE))
END = 2**31 - 1


@dataclass(frozen=True, slots=True)
class AttemptRange:
    """The attempt whose values count for the steps from `first` on and before `before` (None: without end)."""

    attempt: Attempt
    first: int
    before: int | None

    def visible(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of the attempt that no newer attempt hides."""
        rows = rows.filter(attempt=self.attempt)
        return rows if self.before is None else rows.filter(step__lt=self.before)


@dataclass(frozen=True, slots=True)
class Range:
    """Steps above `after` and up to `until`."""

    after: int = -1
    until: int = END


EVERYTHING = Range()


def attempt_ranges(run: Run) -> list[AttemptRange]:
    """Steps by attempt, oldest first."""
    return attempt_ranges_by_run([run])[run.pk]


def attempt_ranges_by_run(runs: Iterable[Run]) -> dict[int, list[AttemptRange]]:
    """The same for several runs, by their ids."""
    result: dict[int, list[AttemptRange]] = {run.pk: [] for run in runs}
    for attempt in Attempt.objects.filter(run__in=result, first_step__isnull=False).order_by("-epoch"):
        parts, first = result[attempt.run_id], attempt.first_step or 0
        if not parts or first < parts[-1].first:
            parts.append(AttemptRange(attempt, first, parts[-1].first if parts else None))
    return {run_id: parts[::-1] for run_id, parts in result.items()}


@dataclass(frozen=True, slots=True)
class _Request:
    """A series of one attempt's range of steps, and the steps to read."""

    series_id: int
    after: int
    until: int


class _Points(NamedTuple):
    """A part of a series in full resolution."""

    steps: Steps
    values: Values


_Piece = _Points | Buckets
Name = tuple[int, str]  # (run id, key)
Parts = Mapping[int, Sequence[AttemptRange]]  # run id → ranges by attempt
Within = Range | Mapping[int, Range]  # the same steps of all runs, or a range per run


def read_buckets(parts: Parts, keys: Collection[str], within: Within, most: int) -> dict[Name, Buckets]:
    """Series of several runs as at most `most` buckets each, ascending by step: one bucket per point if these are few enough.

    Keys that a run lacks are absent from the result.
    """
    return {
        name: blocks.downsample(np.concatenate([_bucketed(piece) for piece in pieces]), most)
        for name, pieces in _read(parts, keys, within, most).items()
    }


def read_points(parts: Parts, keys: Collection[str], within: Within = EVERYTHING) -> dict[Name, Points]:
    """Series in full resolution: steps and values, ascending by step."""
    result: dict[Name, Points] = {}
    for name, pieces in _read(parts, keys, within, None).items():
        points = [(piece.steps, piece.values) for piece in pieces if isinstance(piece, _Points)]
        result[name] = (np.concatenate([s for s, _ in points]), np.concatenate([v for _, v in points]))
    return result


def _read(parts: Parts, keys: Collection[str], within: Within, most: int | None) -> dict[Name, list[_Piece]]:
    """Parts of each series with points in the range, oldest first."""
    by_attempt = {part.attempt.pk: (run_id, part) for run_id, ranges in parts.items() for part in ranges}
    requests: dict[Level, list[_Request]] = defaultdict(list)
    names: dict[int, Name] = {}
    for series in Series.objects.filter(attempt__in=by_attempt, key__in=keys).order_by("attempt__epoch"):
        run_id, part = by_attempt[series.attempt_id]
        steps = within if isinstance(within, Range) else within[run_id]
        until = steps.until if part.before is None else min(steps.until, part.before - 1)
        request = _Request(series.pk, steps.after, until)
        requests[_level(series, request, most)].append(request)
        names[series.pk] = (run_id, series.key)
    pieces: dict[int, list[_Piece]] = {}
    for level, same_level in requests.items():
        pieces |= _fetch(same_level, level)
    result: dict[Name, list[_Piece]] = defaultdict(list)
    for series_id, name in names.items():
        result[name] += pieces.get(series_id, [])
    return {name: pieces for name, pieces in result.items() if pieces}


def _level(series: Series, request: _Request, most: int | None) -> Level:
    """The coarsest level with at least the requested number of buckets; points if all are requested."""
    if most is None:
        return "points"
    if most == 1:
        return "whole"
    length = series.last_step - series.first_step + 1
    shared = min(series.last_step, request.until) - max(series.first_step, request.after + 1) + 1
    points = series.points * max(0, shared) / length
    return next((level for level, size in LEVELS if points / size >= most), "points")


def _fetch(requests: Sequence[_Request], level: Level) -> dict[int, list[_Piece]]:
    """By series: its blocks in order, then its hot points."""
    columns = [[getattr(request, field) for request in requests] for field in ("series_id", "after", "until")]
    connection.ensure_connection()
    # Django's cursors read bytes as hexadecimal text; binary is twice as fast here.
    with psycopg.Cursor(connection.connection) as cursor:
        rows = cursor.execute(ROWS[level], columns, binary=True).fetchall()
    by_series: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for series_id, *row, _ in rows:
        by_series[series_id].append(tuple(row))
    return {request.series_id: list(_pieces(by_series[request.series_id], request)) for request in requests}


def _pieces(rows: Iterable[tuple[Any, ...]], request: _Request) -> Iterator[_Piece]:
    """Blocks as they are, or cut; blocks that overlap hot points are merged with them."""
    tail: list[Points] = []
    for kind, first_step, stride, data in rows:
        if kind == "bucket":
            yield blocks.unpack_buckets(data)
        elif kind == "cut":
            yield from _cut([blocks.unpack_block(first_step, stride, data)], request)
        elif kind == "repeated":
            tail.append(blocks.unpack_block(first_step, stride, data))
        else:
            tail.append(blocks.unpack_points(data))
    if tail:
        yield from _cut(tail, request)


def _cut(parts: Sequence[Points], request: _Request) -> Iterator[_Points]:
    steps, values = blocks.sort_by_step(np.concatenate([s for s, _ in parts]), np.concatenate([v for _, v in parts]))
    inside = slice(*np.searchsorted(steps, [request.after, request.until], side="right"))
    if len(steps[inside]):
        yield _Points(steps[inside], values[inside])


def _bucketed(piece: _Piece) -> Buckets:
    return blocks.as_buckets(piece.steps, piece.values) if isinstance(piece, _Points) else piece


def _statement(level: Level) -> str:
    """SQL for blocks in the range at this level, or as points if they must be cut or hot rows repeat them, and for hot rows."""
    block, hot = Block._meta.db_table, HotPoints._meta.db_table
    kind = "points" if level == "points" else "bucket"
    return f"""
        WITH wanted AS (SELECT * FROM unnest(%s::bigint[], %s::int[], %s::int[]) AS w(series_id, after, until)),
        hot AS MATERIALIZED (
            SELECT h.series_id, h.id, h.first_step, h.data FROM wanted w JOIN {hot} h USING (series_id)
            WHERE h.last_step > w.after AND h.first_step <= w.until
        ),
        tail AS (SELECT series_id, min(first_step) AS first FROM hot GROUP BY series_id),
        block AS (
            SELECT b.*, CASE
                WHEN b.last_step >= t.first THEN 'repeated'
                WHEN b.first_step <= w.after OR b.last_step > w.until OR '{kind}' = 'points' THEN 'cut'
                ELSE 'bucket' END AS kind
            FROM wanted w JOIN {block} b USING (series_id) LEFT JOIN tail t USING (series_id)
            WHERE b.last_step > w.after AND b.first_step <= w.until
        )
        SELECT
            series_id, kind, first_step, stride, CASE kind WHEN 'bucket' THEN {level} ELSE points END AS data, first_step AS place
        FROM block
        UNION ALL
        SELECT series_id, 'hot', first_step, 0, data, {END} + id AS place FROM hot
        ORDER BY series_id, place
    """  # noqa: S608 - the level is one of four words


ROWS = {level: _statement(level) for level in ("points", "fine", "coarse", "whole")}
