"""Cache of run summaries for the streams of one process: each change of a run is read once, for any number of pages.

Reads are batched for a moment and run one at a time, so that a burst of changes is one statement.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from asgiref.sync import sync_to_async
from django.db import connection

from oppo_platform.runs.selectors import run_summary, summaries

GATHER_S = 0.05
# Notifications may be lost: older entries are read again.
OLDEST_S = 10.0


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run's summary as JSON, and the number of its newest change."""

    run_id: int
    cursor: int
    text: str


@dataclass(slots=True)
class _PendingRead:
    """A read that has not started: further requests may join it."""

    run_ids: set[int]
    result: asyncio.Task[dict[int, RunSummary]]


class SummaryCache:
    """The newest summaries, until their run changes."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, RunSummary]] = {}
        self._next: _PendingRead | None = None
        self._one_at_a_time = asyncio.Lock()
        # Runs that changed during the read: its result may already be stale.
        self._changed: set[int] = set()

    def forget(self, run_id: int) -> None:
        """Drop a run that has changed or has no viewers."""
        self._known.pop(run_id, None)
        self._changed.add(run_id)

    async def get(self, run_ids: Iterable[int]) -> list[RunSummary]:
        """Summaries of the runs that exist, by id, each read after its last notified change.

        Raises:
            django.db.Error: they could not be read.
        """
        requested = set(run_ids)
        result = {run_id: head for run_id in requested if (head := self._fresh(run_id)) is not None}
        if missing := requested - result.keys():
            result |= await self._join(missing)
        return [result[run_id] for run_id in sorted(requested & result.keys())]

    def _fresh(self, run_id: int) -> RunSummary | None:
        read_at, head = self._known.get(run_id, (0.0, None))
        return head if time.monotonic() - read_at < OLDEST_S else None

    async def _join(self, run_ids: set[int]) -> dict[int, RunSummary]:
        if self._next is None:
            self._next = _PendingRead(set(), asyncio.create_task(self._read(), name="heads"))
        self._next.run_ids |= run_ids
        return await asyncio.shield(self._next.result)  # a cancelled request does not affect the others

    async def _read(self) -> dict[int, RunSummary]:
        async with self._one_at_a_time:
            await asyncio.sleep(GATHER_S)
            assert self._next is not None, "the pending read is this one until it starts"
            run_ids, self._next = self._next.run_ids, None
            self._changed.clear()
            result = await sync_to_async(_load, thread_sensitive=False)(run_ids)
        now = time.monotonic()
        self._known = {run_id: known for run_id, known in self._known.items() if now - known[0] < OLDEST_S}
        self._known |= {run_id: (now, head) for run_id, head in result.items() if run_id not in self._changed}
        return result


def _load(run_ids: set[int]) -> dict[int, RunSummary]:
    try:
        rows = [run_summary(run) for run in summaries().filter(pk__in=run_ids)]
        return {summary["id"]: RunSummary(summary["id"], summary["cursor"], json.dumps(summary)) for summary in rows}
    finally:
        # The thread persists; it must not hold a connection of the pool.
        connection.close()
