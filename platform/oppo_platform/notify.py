"""PostgreSQL's NOTIFY wakes listeners. Payloads are ids, and a lost one is harmless, because all listeners also poll.

NOTIFY takes a database-wide lock at commit, so it is sent in a small transaction of its own after the one with the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from django.db import connection, transaction

RUNS = "oppo_runs"
SCHEDULER = "oppo_scheduler"


def notify_after_commit(channel: str, payload: str = "") -> None:
    """Notify once the current transaction has committed; a failure is logged, not raised."""
    transaction.on_commit(partial(_notify, channel, [payload]), robust=True)


def run_changed(run_id: int) -> None:
    """Notify live pages of a changed run, after the commit."""
    notify_after_commit(RUNS, str(run_id))


def runs_changed(run_ids: Sequence[int]) -> None:
    """The same for several at once, in one statement."""
    if run_ids:
        transaction.on_commit(partial(_notify, RUNS, [str(run_id) for run_id in run_ids]), robust=True)


def wake_scheduler() -> None:
    """Notify the scheduler, after the commit."""
    notify_after_commit(SCHEDULER)


def _notify(channel: str, payloads: Sequence[str]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload", [channel, list(payloads)])
