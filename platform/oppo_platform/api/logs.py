"""Logs over HTTP: `runs/{id}/logs` (docs/interfaces.md)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from ninja import Query, Router

from oppo_platform.api.log_long_poll import LONGEST_S, when_there_is_more
from oppo_platform.api.lookups import LARGEST_ID, run_of
from oppo_platform.api.problems import problem
from oppo_platform.telemetry.logs import MOST_LINES, Stream, logs, whole_log

router = Router()
LineId = Annotated[int, Query(ge=0, le=LARGEST_ID)]
Seconds = Annotated[float, Query(ge=0, le=LONGEST_S)]


@router.get("runs/{int:run_id}/logs", summary="Log lines of a run")
def show_logs(
    request: HttpRequest,
    run_id: int,
    after: LineId | None = None,
    before: LineId | None = None,
    stream: Stream | None = None,
    q: Annotated[str, Query(max_length=1000)] = "",
    limit: int = MOST_LINES,
    wait: Seconds = 0.0,
) -> dict[str, Any] | HttpResponseBase:
    """The last lines, the next ones after `after` (0: the first ones), or the last ones before `before`.

    With `wait` the next ones as soon as there are any. Lines are untrusted: show them as text.
    """
    if wait and after is None:
        return problem(422, "`wait` waits for the lines after one: give `after` as well.")
    read = partial(logs, after=after, before=before, stream=stream, words=q, limit=limit)
    told = read(run_of(request, run_id))
    if told["lines"] or told["ended"] or not wait:
        return told
    return when_there_is_more(request, run_id, told, wait, read)


@router.get("runs/{int:run_id}/logs.txt", summary="The whole log as text")
def download_logs(request: HttpRequest, run_id: int) -> StreamingHttpResponse:
    """Every line of all attempts as `time attempt stream text`."""
    run = run_of(request, run_id)
    answer = StreamingHttpResponse(whole_log(run), content_type="text/plain; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}.log"'
    return answer
