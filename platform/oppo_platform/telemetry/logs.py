"""Log lines of a run's engines and supervisors in order of arrival. Lines are untrusted text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, Literal

from asgiref.sync import sync_to_async
from django.db.models import QuerySet, TextField, Value
from django.db.models.functions import Lower

from oppo_contract.states import ENDED
from oppo_platform.runs.models import Attempt, Run
from oppo_platform.telemetry.models import LogLine
from oppo_platform.telemetry.search import search_terms

MOST_LINES = 1000
LINES_A_READ = 5000
# A thousand lines as model instances with their attempts take more than three times as long.
COLUMNS = ("pk", "attempt_id", "stream", "text", "time")

# The platform itself also writes lines, for example when it stops storing metrics.
Stream = Literal["stdout", "stderr", "supervisor", "platform"]


def logs(
    run: Run,
    *,
    after: int | None = None,
    before: int | None = None,
    stream: Stream | None = None,
    words: str = "",
    limit: int = MOST_LINES,
) -> dict[str, Any]:
    """Lines of all attempts: `{"lines": [{id, attempt, stream, text, time}], "next", "earlier", "ended"}`.

    Args:
        after: the first lines after this id, the `next` of the previous call; 0: from the beginning.
        before: the last lines before this id. With neither, the last lines of all.
        stream: only this one.
        words: only lines with each of these words (`search.search_terms`), case-insensitive.
        limit: number of lines, at most a thousand.

    Returns:
        `earlier`: whether matching lines exist before the first returned one; None (unknown) with `after`.
        `ended`: whether the run had ended when it was read, which was before its lines were.
    """
    ended = run.state in ENDED
    limit = max(1, min(limit, MOST_LINES))
    # Without a join the index of one attempt's lines is read from its end.
    epochs = dict(Attempt.objects.filter(run=run).values_list("pk", "epoch"))
    rows = _matching(LogLine.objects.filter(attempt__in=list(epochs)), stream, words).values_list(*COLUMNS)
    if after is not None:
        lines = [_as_line(epochs, *line) for line in rows.filter(pk__gt=after).order_by("pk")[:limit]]
        return {"lines": lines, "next": lines[-1]["id"] if lines else after, "earlier": None if after else False, "ended": ended}
    if before is not None:
        rows = rows.filter(pk__lt=before)
    newest = list(rows.order_by("-pk")[: limit + 1])
    lines = [_as_line(epochs, *line) for line in newest[:limit][::-1]]
    return {"lines": lines, "next": lines[-1]["id"] if lines else 0, "earlier": len(newest) > limit, "ended": ended}


def _matching(rows: QuerySet[LogLine], stream: Stream | None, words: str) -> QuerySet[LogLine]:
    if stream is not None:
        rows = rows.filter(stream=stream)
    for piece in search_terms(words):
        # Both sides use the database's lower case: its rules and Python's differ in a few letters.
        rows = rows.alias(low=Lower("text")).filter(low__contains=Lower(Value(piece, output_field=TextField())))
    return rows


def _as_line(epochs: dict[int, int], pk: int, attempt_id: int, stream: Stream, text: str, time: datetime) -> dict[str, Any]:
    return {"id": pk, "attempt": epochs[attempt_id], "stream": stream, "text": text, "time": time.isoformat()}


async def whole_log(run: Run) -> AsyncIterator[bytes]:
    """Every line as `time attempt stream text`, in UTF-8; a few thousand lines are in memory at a time."""
    query = LogLine.objects.filter(attempt__run=run).order_by("pk")
    after = 0
    while True:
        page = query.filter(pk__gt=after).values_list("pk", "time", "attempt__epoch", "stream", "text")[:LINES_A_READ]
        rows = await sync_to_async(list)(page)
        if not rows:
            return
        after = rows[-1][0]
        lines = [f"{time.isoformat(timespec='milliseconds')} {epoch} {stream} {text}\n" for _, time, epoch, stream, text in rows]
        yield "".join(lines).encode("utf-8", "replace")
