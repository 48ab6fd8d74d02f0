"""PostgreSQL's NOTIFY: wakes listeners up. It carries ids only and is lost without harm, because everybody also polls.

NOTIFY takes a lock that is global to the database when its transaction commits, so it is sent in a small transaction of its
own, after the one that changed something.
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
    """Tell live pages that a run has something new, after the commit."""
    notify_after_commit(RUNS, str(run_id))


def runs_changed(run_ids: Sequence[int]) -> None:
    """The same of several at once, in one statement."""
    if run_ids:
        transaction.on_commit(partial(_notify, RUNS, [str(run_id) for run_id in run_ids]), robust=True)


def wake_scheduler() -> None:
    """There may be something to place, after the commit."""
    notify_after_commit(SCHEDULER)


def _notify(channel: str, payloads: Sequence[str]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload", [channel, list(payloads)])
