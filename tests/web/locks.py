"""Waits until a session waits for another's lock, for tests in which two processes act in a chosen order."""

from __future__ import annotations

import time

from django.db import connection


def wait_for_lock() -> None:
    """Until some session of this database waits for a lock. Raises AssertionError after 30 s."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    deadline = time.monotonic() + 30
    with connection.cursor() as cursor:
        while cursor.execute(waiting).fetchone() == (0,):
            assert time.monotonic() < deadline, "no session waits for a lock"
            time.sleep(0.005)
