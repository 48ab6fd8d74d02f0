"""The housekeeper process: a round every few seconds, and beside it the courier of alerts, whom a slow reader may hold up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import structlog
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections

from oppo_platform.alerts.courier import deliver_due
from oppo_platform.telemetry.housekeeping import keep_house

log = structlog.get_logger(__name__)


class Command(BaseCommand):
    """`manage.py housekeeper` runs until SIGTERM or SIGINT."""

    help = "Seal the series that runs have told, and tell people of alerts."

    def handle(self, *args: Any, **options: Any) -> None:
        """Keep house until told to stop."""
        stop = threading.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        # A daemon: what it was sending when the process ends is due again later.
        threading.Thread(target=_deliver, args=(stop,), name="courier", daemon=True).start()
        _rounds(stop, keep_house, "sealed")


def _deliver(stop: threading.Event) -> None:
    try:
        _rounds(stop, deliver_due, "delivered")
    finally:
        stop.set()  # without its courier the process is of no use: whoever looks after it starts it again


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
