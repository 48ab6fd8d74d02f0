"""The housekeeper process: periodic rounds, and two threads with database connections of their own for slow tasks.

delivery   sends alerts, which a slow receiver may delay
deletion   deletes rows and folders, which a large folder or a VACUUM may delay
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections

from oppo_platform.alerts.delivery import deliver_due
from oppo_platform.housekeeping.rounds import run_deletions, run_round

STOP_TIMEOUT_S = 3.0  # for tasks in progress

log = structlog.get_logger(__name__)


class Command(BaseCommand):
    """`manage.py housekeeper` runs until SIGTERM or SIGINT."""

    help = "Compact stored series, send alert notifications and apply retention."

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until a signal."""
        stop = threading.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        work_until(stop)


def work_until(stop: threading.Event) -> None:
    """Run rounds and threads until `stop`; then wait for the threads for a moment."""
    threads = [
        _start_thread(stop, deliver_due, "delivered", "delivery"),
        _start_thread(stop, run_deletions, "deleted", "deletion"),
    ]
    _repeat(stop, run_round, "compacted")
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _start_thread(stop: threading.Event, task: Callable[[], int], done: str, name: str) -> threading.Thread:
    """Repeat a task in a daemon thread: an interrupted task is due again, or continues, later."""

    def work() -> None:
        try:
            _repeat(stop, task, done)
        finally:
            connections.close_all()
            stop.set()  # end the process after an error, so that its supervisor restarts it

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _repeat(stop: threading.Event, task: Callable[[], int], done: str) -> None:
    """Repeat a task until `stop`."""
    while not stop.is_set():
        try:
            if count := task():
                log.info(done, count=count)
        except DatabaseError as error:
            # The database restarts or is unreachable; the task is repeated.
            log.warning("database away, trying again", error=str(error).strip())
            connections.close_all()
        stop.wait(settings.OPPO_HOUSEKEEPING_S)
