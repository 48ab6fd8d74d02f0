"""How much room is left where this node writes: artifacts and the outbox. A file system that hangs holds up no heartbeat."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from oppo_contract.safe_delete import OutsideRootError, file_url_path
from oppo_contract.wire import DiskReport

LOOK_EVERY_S = 10.0
FIRST_LOOK_WITHIN_S = 0.5

log = structlog.get_logger("worker.disks")


class Disks:
    """Looks now and then, in a thread of its own; `reports` is what was seen last."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places
        self._seen: list[DiskReport] = []
        self._looked_at = float("-inf")
        self._look: threading.Thread | None = None

    def reports(self) -> list[DiskReport]:
        """The newest figures; empty before the first, and without what cannot be looked at."""
        due = time.monotonic() - self._looked_at >= LOOK_EVERY_S
        if due and (self._look is None or not self._look.is_alive()):
            first = self._look is None
            self._look = threading.Thread(target=self._look_now, name="disks", daemon=True)
            self._look.start()
            if first:
                self._look.join(FIRST_LOOK_WITHIN_S)
        return self._seen

    def _look_now(self) -> None:
        seen = [report for what, path in self._places.items() if (report := _report(what, path)) is not None]
        self._seen, self._looked_at = seen, time.monotonic()


def disks_of(artifact_root: str, worker_folder: Path) -> Disks:
    """Of a node: the root only where it is a folder of this machine."""
    try:
        return Disks({"artifacts": file_url_path(artifact_root), "outbox": worker_folder})
    except OutsideRootError:
        return Disks({"outbox": worker_folder})


def _report(what: str, path: Path) -> DiskReport | None:
    place = path
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        log.warning("disk_not_seen", what=what, path=str(place), error=str(error))
        return None
    return DiskReport.model_validate({"what": what, "path": str(path), "free_bytes": usage.free, "total_bytes": usage.total})
