"""The housekeeper process: a round every few seconds, and two threads with database connections of their own,

    courier    sends alerts, which a slow receiver may delay
    clearer    frees disk space, which a large folder or a VACUUM may delay

so that compaction waits for neither.
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
from oppo_platform.housekeeping.rounds import run_round
from oppo_platform.storage.housekeeping import make_room

STOPS_WITHIN_S = 3.0  # for work in progress

log = structlog.get_logger(__name__)


class Command(BaseCommand):
    """`manage.py housekeeper` runs until SIGTERM or SIGINT."""

    help = "Compact stored series, send alert notifications and apply retention."

    def handle(self, *args: Any, **options: Any) -> None:
        """Run until SIGTERM or SIGINT."""
        stop = threading.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        work_until(stop)


def work_until(stop: threading.Event) -> None:
    """Run everything until `stop`; then give the threads a moment to end their rounds."""
    threads = [_start_thread(stop, deliver_due, "delivered", "courier"), _start_thread(stop, make_room, "made room", "clearer")]
    _rounds(stop, run_round, "sealed")
    deadline = time.monotonic() + STOPS_WITHIN_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


def _start_thread(stop: threading.Event, once: Callable[[], int], done: str, name: str) -> threading.Thread:
    """Start rounds in a thread. A daemon: interrupted work is due again later, or continues where it stopped."""

    def work() -> None:
        try:
            _rounds(stop, once, done)
        finally:
            connections.close_all()
            stop.set()  # the process is useless without this thread; its supervisor restarts it

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _rounds(stop: threading.Event, once: Callable[[], int], done: str) -> None:
    """Repeat until `stop`."""
    while not stop.is_set():
        try:
            if count := once():
                log.info(done, count=count)
        except DatabaseError as error:
            # It restarts or is unreachable; the work remains due.
            log.warning("database away, trying again", error=str(error).strip())
            connections.close_all()
        stop.wait(settings.OPPO_HOUSEKEEPING_S)
