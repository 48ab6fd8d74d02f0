"""Logs over HTTP: `runs/{id}/logs` (docs/interfaces.md)."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from ninja import Query, Router
from typing_extensions import TypedDict

from oppo_platform.api.history import WORDS
from oppo_platform.api.log_long_poll import LONGEST_S, when_there_is_more
from oppo_platform.api.lookups import LARGEST_ID, RunId, get_run_row
from oppo_platform.api.openapi import file
from oppo_platform.api.problems import problem
from oppo_platform.telemetry.logs import MOST_LINES, Stream, logs, whole_log

router = Router()
AFTER = "The first lines after this one: `next` of the call before. 0 begins with the first line of all."
WAIT = f"Seconds, at most {LONGEST_S:g}, to wait for a line after `after`, or for the run's end, while there is none."


class LogLineItem(TypedDict):
    """A line of a log; its text is untrusted."""

    id: int
    attempt: int
    stream: Stream
    text: str
    time: str


class Logs(TypedDict):
    """Lines in order of arrival; `next` is the `after` of the next call. `ended`: the run writes no more lines."""

    lines: list[LogLineItem]
    next: int
    earlier: bool | None
    ended: bool


@router.get("runs/{int:run_id}/logs", summary="Log lines of a run")
def show_logs(
    request: HttpRequest,
    run_id: RunId,
    after: Annotated[int | None, Query(ge=0, le=LARGEST_ID, description=AFTER)] = None,
    before: Annotated[int | None, Query(ge=0, le=LARGEST_ID, description="The last lines before this one.")] = None,
    stream: Annotated[Stream | None, Query(description="Only lines of this stream.")] = None,
    q: Annotated[str, Query(max_length=1000, description=WORDS)] = "",
    limit: Annotated[int, Query(description=f"The most lines; more than {MOST_LINES:,} count as {MOST_LINES:,}.")] = MOST_LINES,
    wait: Annotated[float, Query(ge=0, le=LONGEST_S, description=WAIT)] = 0.0,
) -> Logs | HttpResponseBase:
    """The last lines, the next ones after `after` (0: the first ones), or the last ones before `before`.

    With `wait` the next ones as soon as there are any. Lines are untrusted: show them as text.
    """
    if wait and after is None:
        return problem(422, "`wait` requires `after`.")
    read = partial(logs, after=after, before=before, stream=stream, words=q, limit=limit)
    page = read(get_run_row(request, run_id))
    if page["lines"] or page["ended"] or not wait:
        return page
    return when_there_is_more(request, run_id, page, wait, read)


@router.get("runs/{int:run_id}/logs.txt", summary="Download the log as text", openapi_extra=file("text/plain"))
def download_logs(request: HttpRequest, run_id: RunId) -> StreamingHttpResponse:
    """Every line of all attempts as `time attempt stream text`."""
    run = get_run_row(request, run_id)
    answer = StreamingHttpResponse(whole_log(run), content_type="text/plain; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}.log"'
    return answer
