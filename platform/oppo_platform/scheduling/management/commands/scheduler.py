"""The scheduler process: a cycle after every change, and at least every two seconds."""

from __future__ import annotations

import signal
import threading
from typing import Any

import psycopg
import structlog
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connection, connections

from oppo_platform.notify import SCHEDULER
from oppo_platform.scheduling.cycle import Kept, run_cycle

log = structlog.get_logger(__name__)

LONGEST_WAIT_S = 2.0


class Command(BaseCommand):
    """`manage.py scheduler` runs until SIGTERM or SIGINT. `oppo scheduler --once` runs one cycle and prints its result."""

    help = "Allocate devices to waiting runs."

    def handle(self, *args: Any, **options: Any) -> None:
        """Run cycles until a stop signal."""
        stop = threading.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        listener, kept = Listener(), Kept()
        while not stop.is_set():
            try:
                result = run_cycle(kept)
                if result is not None and (result.placed or result.preempted or result.fenced):
                    log.info("cycle", **result.counts(), took_s=round(result.took_s, 3))
                listener.wait(LONGEST_WAIT_S)
            except (DatabaseError, psycopg.Error) as error:
                # The database restarts or is unreachable: all state is in it, so retry.
                log.warning("database away, trying again", error=str(error).strip())
                listener.close()
                kept = Kept()  # it may be another database after a restore
                connections.close_all()
                stop.wait(LONGEST_WAIT_S)
        listener.close()


class Listener:
    """A dedicated database connection that waits for a notification."""

    def __init__(self) -> None:
        self._connection: psycopg.Connection[Any] | None = None

    def wait(self, seconds: float) -> None:
        """Return at the first notification, or after `seconds`."""
        if self._connection is None:
            params = connection.get_connection_params()
            keys = ("dbname", "user", "password", "host", "port")
            self._connection = psycopg.connect(**{k: params[k] for k in keys if k in params}, autocommit=True)
            self._connection.execute(f"LISTEN {SCHEDULER}")
        heard = sum(1 for _ in self._connection.notifies(timeout=seconds, stop_after=1))
        while heard:  # one cycle handles all that arrived meanwhile
            heard = sum(1 for _ in self._connection.notifies(timeout=0))

    def close(self) -> None:
        """Close the connection; the next `wait` opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
