"""What a run's engines and supervisors wrote, in the order in which it arrived. Lines are untrusted text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from asgiref.sync import sync_to_async
from django.db.models import QuerySet, TextField, Value
from django.db.models.functions import Lower

from oppo_platform.runs.models import Run
from oppo_platform.telemetry.models import LogLine
from oppo_platform.telemetry.search import pieces

MOST_LINES = 1000
LINES_A_READ = 5000

Stream = Literal["stdout", "stderr", "supervisor"]


def logs(
    run: Run, *, after: int = 0, before: int = 0, stream: Stream | None = None, words: str = "", limit: int = MOST_LINES
) -> dict[str, Any]:
    """Lines of all attempts: `{"lines": [{id, attempt, stream, text, time}], "next", "earlier"}`.

    Args:
        after: the lines that follow this id; the `next` of the call before.
        before: the last ones before this id. With neither, the last ones of all.
        stream: only this one.
        words: only lines with each of these pieces (`search.pieces`), in upper or lower case.
        limit: how many, at most a thousand.

    Returns:
        `earlier` says whether matching lines stand before the first one told; it is None after `after`, where they surely may.
    """
    limit = max(1, min(limit, MOST_LINES))
    rows = _matching(LogLine.objects.filter(attempt__run=run), stream, words).select_related("attempt")
    if after:
        found = list(rows.filter(pk__gt=after).order_by("pk")[:limit])
        return {"lines": [_told(line) for line in found], "next": found[-1].pk if found else after, "earlier": None}
    if before:
        rows = rows.filter(pk__lt=before)
    newest = list(rows.order_by("-pk")[: limit + 1])
    found = newest[:limit][::-1]
    return {"lines": [_told(line) for line in found], "next": found[-1].pk if found else 0, "earlier": len(newest) > limit}


def _matching(rows: QuerySet[LogLine], stream: Stream | None, words: str) -> QuerySet[LogLine]:
    if stream is not None:
        rows = rows.filter(stream=stream)
    for piece in pieces(words):
        # Lower case is the database's on both sides: its rules and Python's differ in a few letters.
        rows = rows.alias(low=Lower("text")).filter(low__contains=Lower(Value(piece, output_field=TextField())))
    return rows


def _told(line: LogLine) -> dict[str, Any]:
    return {
        "id": line.pk,
        "attempt": line.attempt.epoch,
        "stream": line.stream,
        "text": line.text,
        "time": line.time.isoformat(),
    }


async def whole_log(run: Run) -> AsyncIterator[bytes]:
    """Every line as `time attempt stream text`, in UTF-8; a few thousand lines are in memory at a time."""
    rows = LogLine.objects.filter(attempt__run=run).order_by("pk")
    after = 0
    while True:
        page = rows.filter(pk__gt=after).values_list("pk", "time", "attempt__epoch", "stream", "text")[:LINES_A_READ]
        found = await sync_to_async(list)(page)
        if not found:
            return
        after = found[-1][0]
        lines = [f"{time.isoformat(timespec='milliseconds')} {epoch} {stream} {text}\n" for _, time, epoch, stream, text in found]
        yield "".join(lines).encode("utf-8", "replace")
