"""PostgreSQL's NOTIFY: wakes listeners up. It carries ids only and is lost without harm, because everybody also polls.

NOTIFY takes a lock that is global to the database when its transaction commits, so it is sent in a small transaction of its
own, after the one that changed something.
"""

from __future__ import annotations

from functools import partial

from django.db import connection, transaction

RUNS = "oppo_runs"
SCHEDULER = "oppo_scheduler"


def notify_after_commit(channel: str, payload: str = "") -> None:
    """Notify once the current transaction has committed; a failure is logged, not raised."""
    transaction.on_commit(partial(_notify, channel, payload), robust=True)


def run_changed(run_id: int) -> None:
    """Tell live pages that a run has something new, after the commit."""
    notify_after_commit(RUNS, str(run_id))


def wake_scheduler() -> None:
    """There may be something to place, after the commit."""
    notify_after_commit(SCHEDULER)


def _notify(channel: str, payload: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", [channel, payload])
