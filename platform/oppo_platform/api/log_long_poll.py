"""Waits for a log's next lines: the head of the reply goes out at once, its body when there is something to tell.

So no thread and no connection of the database is held meanwhile, and who leaves ends the wait. The run's notifications are hints
(`telemetry.notifications`): a lost one costs at most `LOOK_EVERY_S`.
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

# Proxies give up on a reply that is silent for 30 s or more.
LONGEST_S = 25.0
LOOK_EVERY_S = 10.0
# A run that tells much is looked at four times a second.
SHORTEST_PAUSE_S = 0.25

Page = dict[str, Any]


def when_there_is_more(
    request: HttpRequest, run_id: int, told: Page, within_s: float, read: Callable[[Run], Page]
) -> StreamingHttpResponse:
    """The page that `read` finds as soon as it has lines or the run has ended; `told` after `within_s` seconds.

    Args:
        told: the page as it is, without lines. Also what who may see the run no more gets: the next call says so.
    """

    def look() -> Page | None:
        try:
            found = read(Run.objects.only("state").get(pk=run_id))
            if not found["lines"] and not found["ended"]:
                return None
            return found if may_see(request, [run_id]) else told
        finally:
            connection.close()

    close_old_connections()  # this request's own, which would be kept as long as the reply takes
    return StreamingHttpResponse(_waited_for(run_id, told, within_s, look), content_type="application/json; charset=utf-8")


async def _waited_for(run_id: int, told: Page, within_s: float, look: Callable[[], Page | None]) -> AsyncIterator[bytes]:
    until = time.monotonic() + within_s
    # First the ear, then the look: what comes in between is heard.
    async with feed().subscribe([run_id]) as subscription:
        while (found := await sync_to_async(look, thread_sensitive=False)()) is None and time.monotonic() < until:
            await asyncio.sleep(min(SHORTEST_PAUSE_S, until - time.monotonic()))
            await subscription.changed(min(LOOK_EVERY_S, until - time.monotonic()))
    yield orjson.dumps(found or told)
