"""The housekeeper process: a round every few seconds, and beside it, each in a thread and with a database connection of its own,

    courier    sends alerts, which a slow reader may hold up
    clearer    makes room, which a large folder or a VACUUM may hold up

so that sealing waits for neither.
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
from oppo_platform.housekeeping.rounds import keep_house
from oppo_platform.storage.housekeeping import make_room

STOPS_WITHIN_S = 3.0  # what is in hand may come to its end

log = structlog.get_logger(__name__)


class Command(BaseCommand):
    """`manage.py housekeeper` runs until SIGTERM or SIGINT."""

    help = "Compact stored series, send alert notifications and apply retention."

    def handle(self, *args: Any, **options: Any) -> None:
        """Keep house until told to stop."""
        stop = threading.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        work_until(stop)


def work_until(stop: threading.Event) -> None:
    """Do everything that the process is for until `stop`; then give the threads a moment to end their rounds."""
    beside = [_beside(stop, deliver_due, "delivered", "courier"), _beside(stop, make_room, "made room", "clearer")]
    _rounds(stop, keep_house, "sealed")
    deadline = time.monotonic() + STOPS_WITHIN_S
    for thread in beside:
        thread.join(max(0.0, deadline - time.monotonic()))


def _beside(stop: threading.Event, once: Callable[[], int], done: str, name: str) -> threading.Thread:
    """Start rounds in a thread. A daemon: what it does when the process ends is due again later, or goes on where it was."""

    def work() -> None:
        try:
            _rounds(stop, once, done)
        finally:
            connections.close_all()
            stop.set()  # without its courier the process is of no use: whoever looks after it starts it again

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _rounds(stop: threading.Event, once: Callable[[], int], done: str) -> None:
    """Do it again and again until `stop`."""
    while not stop.is_set():
        try:
            if count := once():
                log.info(done, count=count)
        except DatabaseError as error:
            # It restarts or is away; whatever was to be done is still to be done.
            log.warning("database away, trying again", error=str(error).strip())
            connections.close_all()
        stop.wait(settings.OPPO_HOUSEKEEPING_S)
