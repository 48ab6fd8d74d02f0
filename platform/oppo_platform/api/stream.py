"""The live stream: `GET /api/v1/stream?runs=1,2&cursor=1:57,2:3`, server-sent events, one stream per tab.

    id: 1:58,2:3
    event: run
    data: {RunSummary}

A missed event needs no replay: the next summary is the whole head of a run with its cursor. A reconnecting client sends its
position
(`Last-Event-ID`, or `cursor`), and gets the runs that have changed since at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from asgiref.sync import sync_to_async
from django.contrib.auth.decorators import login_not_required
from django.db import close_old_connections, connection
from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from django.views.decorators.http import require_GET

from oppo_platform.api.auth import may_see, request_user, sends_token
from oppo_platform.api.metrics import parse_ids
from oppo_platform.api.problems import problem, too_many, unauthenticated
from oppo_platform.api.rate_limit import Allowance, TooMany, count_request
from oppo_platform.runs.models import Run
from oppo_platform.telemetry.notifications import feed
from oppo_platform.telemetry.summary_cache import RunSummary

MOST_RUNS = 200
PING_S = 15.0
# At most four summaries per second of one run.
SHORTEST_PAUSE_S = 0.25
# A stream may last this long after a logout or the loss of access.
RECHECK_S = 15.0

Cursors = dict[int, int]


@login_not_required
@require_GET
async def stream(request: HttpRequest) -> HttpResponseBase:
    """Summaries of some runs whenever they change; 401 without login, 404 if one of the runs does not exist.

    With a token it counts as one request.
    """
    try:
        allowance = await sync_to_async(_counted, thread_sensitive=False)(request)
    except TooMany as error:
        return too_many(error)
    answer = await _answer(request)
    for name, value in (allowance.headers() if allowance else {}).items():
        answer.headers[name] = value
    return answer


async def _answer(request: HttpRequest) -> HttpResponseBase:
    if await _may_see(request, []) is None:
        return unauthenticated()
    try:
        run_ids = parse_ids(request.GET.get("runs", ""))
        cursors = parse_cursors(request.headers.get("Last-Event-ID") or request.GET.get("cursor", ""))
    except (Run.DoesNotExist, ValueError):
        return problem(404, "A run id is out of range, or the cursor is not `run:number,…`.")
    if not run_ids or len(run_ids) > MOST_RUNS:
        return problem(422, f"`runs` must be 1 to {MOST_RUNS} run ids, separated by commas.")
    if not await _may_see(request, run_ids):
        return problem(404, "Run not found, or you do not have access.")
    answer = StreamingHttpResponse(_events(request, run_ids, cursors), content_type="text/event-stream")
    answer.headers["Cache-Control"] = "no-cache, no-transform"
    answer.headers["X-Accel-Buffering"] = "no"
    return answer


def parse_cursors(text: str) -> Cursors:
    """`1:57,2:3` as run id → cursor. Raises ValueError."""
    pairs = (part.split(":") for part in text.split(",") if part.strip())
    return {int(run_id): int(cursor) for run_id, cursor in pairs}


async def _events(request: HttpRequest, run_ids: list[int], cursors: Cursors) -> AsyncIterator[bytes]:
    """The events, until the client disconnects or loses access.

    No database connection is held meanwhile. Middleware may have taken one in the request's thread, and would hold it until
    the end: a few open tabs would use up the web process's pool.
    """
    await sync_to_async(close_old_connections)()
    yield b"retry: 1000\n\n"
    known = {run_id: cursors.get(run_id, -1) for run_id in run_ids}
    async with feed().subscribe(run_ids) as subscription:
        allowed_until, changed = time.monotonic() + RECHECK_S, True
        while True:
            if not changed or time.monotonic() > allowed_until:
                if not await _may_see(request, run_ids):
                    return
                allowed_until = time.monotonic() + RECHECK_S
            # Also after an interval without notifications: one may have been lost.
            news = [head for head in await feed().summaries.get(run_ids) if head.cursor > known[head.run_id]]
            for head in news:
                known[head.run_id] = head.cursor
                yield _event(head, known)
            if not news and not changed:
                yield b": still here\n\n"
            await asyncio.sleep(SHORTEST_PAUSE_S)
            changed = await subscription.changed(PING_S)


def _event(head: RunSummary, known: Cursors) -> bytes:
    cursor = ",".join(f"{run_id}:{number}" for run_id, number in known.items() if number >= 0)
    return f"id: {cursor}\nevent: run\ndata: {head.text}\n\n".encode()


def _counted(request: HttpRequest) -> Allowance | None:
    try:
        user = request_user(request) if sends_token(request) else None
    finally:
        connection.close()
    return count_request(user.bound_token_id) if user is not None and user.bound_token_id is not None else None


async def _may_see(request: HttpRequest, run_ids: list[int]) -> bool | None:
    """Whether the user may see all of these runs now; None if not logged in any more."""
    return await sync_to_async(may_see, thread_sensitive=False)(request, run_ids)
