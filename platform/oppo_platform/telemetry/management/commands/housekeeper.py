"""The housekeeper process: a round every few seconds."""

from __future__ import annotations

import signal
import threading
from typing import Any

import structlog
from django.conf import settings
from django.core.management.base import BaseCommand
from django.db import DatabaseError, connections

from oppo_platform.telemetry.housekeeping import keep_house

log = structlog.get_logger(__name__)


class Command(BaseCommand):
    """`manage.py housekeeper` runs until SIGTERM or SIGINT."""

    help = "Seal the series that runs have told."

    def handle(self, *args: Any, **options: Any) -> None:
        """Keep house until told to stop."""
        stop = threading.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        while not stop.is_set():
            try:
                if sealed := keep_house():
                    log.info("sealed", points=sealed)
            except DatabaseError as error:
                # It restarts or is away; what is hot stays hot.
                log.warning("database away, trying again", error=str(error).strip())
                connections.close_all()
            stop.wait(settings.OPPO_HOUSEKEEPING_S)
