"""Notifications of changed runs: one LISTEN connection per process, fanned out in memory to all streams.

A notification is a hint and may be lost, so `stream` also polls every few seconds. After a lost connection every subscriber is
woken, because any run may have changed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
import structlog
from django.db import connection

from oppo_platform.notify import RUNS
from oppo_platform.telemetry.summary_cache import SummaryCache

log = structlog.get_logger(__name__)

RECONNECT_S = 1.0


class Subscription:
    """The subscription of one stream to changes of its runs."""

    def __init__(self, run_ids: Iterable[int]) -> None:
        self.run_ids = frozenset(run_ids)
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Mark a change."""
        self._changed.set()

    async def changed(self, within_s: float) -> bool:
        """Wait for a change, at most `within_s` seconds; returns whether there was one.

        Not `asyncio.wait_for`: before Python 3.12 it returns normally if it is cancelled just after the change, and the stream
        of a disconnected client would go on for ever.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True


class RunFeed:
    """The process's listener. It runs while there are subscribers."""

    def __init__(self) -> None:
        self.summaries = SummaryCache()
        self._subscriptions: defaultdict[int, set[Subscription]] = defaultdict(set)
        self._listener: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def subscribe(self, run_ids: Iterable[int]) -> AsyncIterator[Subscription]:
        """Subscribe to these runs within the block."""
        subscription = Subscription(run_ids)
        for run_id in subscription.run_ids:
            if not self._subscriptions[run_id]:
                self.summaries.forget(run_id)  # its changes were not received
            self._subscriptions[run_id].add(subscription)
        if self._listener is None or self._listener.done():
            self._listener = asyncio.create_task(self._listen(), name="run-feed")
        try:
            yield subscription
        finally:
            self._leave(subscription)

    def _leave(self, subscription: Subscription) -> None:
        for run_id in subscription.run_ids:
            self._subscriptions[run_id].discard(subscription)
            if not self._subscriptions[run_id]:
                del self._subscriptions[run_id]
                self.summaries.forget(run_id)
        if not self._subscriptions and self._listener is not None:
            self._listener.cancel()
            self._listener = None

    async def _listen(self) -> None:
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(**listen_params(), autocommit=True) as listening:
                    await listening.execute(f"LISTEN {RUNS}")
                    for run_id in list(self._subscriptions):
                        self._wake(run_id)
                    async for notice in listening.notifies():
                        self._wake(int(notice.payload))
            except psycopg.Error as error:
                log.warning("live feed lost its connection, trying again", error=str(error).strip())
            await asyncio.sleep(RECONNECT_S)

    def _wake(self, run_id: int) -> None:
        if subscriptions := self._subscriptions.get(run_id):
            self.summaries.forget(run_id)
            for subscription in subscriptions:
                subscription.wake()


def listen_params() -> dict[str, Any]:
    """Connection parameters of a dedicated database connection."""
    params = connection.get_connection_params()
    return {key: params[key] for key in ("dbname", "user", "password", "host", "port") if key in params}


_feeds: WeakKeyDictionary[asyncio.AbstractEventLoop, RunFeed] = WeakKeyDictionary()


def feed() -> RunFeed:
    """The feed of the running event loop."""
    return _feeds.setdefault(asyncio.get_running_loop(), RunFeed())
