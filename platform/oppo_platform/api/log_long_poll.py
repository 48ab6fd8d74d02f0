"""Long polling of a log: the response's head is sent at once, its body when there are new lines.

No thread or database connection is held meanwhile, and a disconnect ends the wait. Notifications (`telemetry.notifications`) are
hints: a lost one costs at most `LOOK_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from asgiref.sync import sync_to_async
from django.db import close_old_connections, connection
from django.http import HttpRequest, StreamingHttpResponse

from oppo_platform.api.auth import may_see
from oppo_platform.runs.models import Run
from oppo_platform.telemetry.notifications import feed

# Proxies time out a response without data for 30 s or more.
LONGEST_S = 25.0
LOOK_EVERY_S = 10.0
# A run with frequent lines is read at most four times per second.
SHORTEST_PAUSE_S = 0.25

Page = dict[str, Any]


def when_there_is_more(
    request: HttpRequest, run_id: int, page: Page, within_s: float, read: Callable[[Run], Page]
) -> StreamingHttpResponse:
    """The page that `read` returns once it has lines or the run has ended; the empty page after `within_s` seconds.

    Args:
        page: the current page, without lines; also the result if the user may no longer see the run: the next call
        reports that.
    """

    def poll() -> Page | None:
        try:
            result = read(Run.objects.only("state").get(pk=run_id))
            if not result["lines"] and not result["ended"]:
                return None
            return result if may_see(request, [run_id]) else page
        finally:
            connection.close()

    close_old_connections()  # this request's connection would otherwise be held as long as the response takes
    return StreamingHttpResponse(_wait_and_render(run_id, page, within_s, poll), content_type="application/json; charset=utf-8")


async def _wait_and_render(run_id: int, page: Page, within_s: float, poll: Callable[[], Page | None]) -> AsyncIterator[bytes]:
    until = time.monotonic() + within_s
    # Subscribe before reading, so that no change is missed.
    async with feed().subscribe([run_id]) as subscription:
        while (result := await sync_to_async(poll, thread_sensitive=False)()) is None and time.monotonic() < until:
            await asyncio.sleep(min(SHORTEST_PAUSE_S, until - time.monotonic()))
            await subscription.changed(min(LOOK_EVERY_S, until - time.monotonic()))
    yield orjson.dumps(result or page)
