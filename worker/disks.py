"""Free disk space for artifacts and the outbox, measured in a thread so that a hanging file system delays no heartbeat."""

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

CHECK_EVERY_S = 10.0
FIRST_CHECK_TIMEOUT_S = 0.5

log = structlog.get_logger("worker.disks")


class DiskMonitor:
    """Measures the disks of named folders periodically in a thread."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._folders = folders
        self._reports: list[DiskReport] = []
        self._checked_at = float("-inf")
        self._thread: threading.Thread | None = None

    def reports(self) -> list[DiskReport]:
        """The latest measurements; empty before the first one, and without folders that cannot be read."""
        due = time.monotonic() - self._checked_at >= CHECK_EVERY_S
        if due and (self._thread is None or not self._thread.is_alive()):
            first = self._thread is None
            self._thread = threading.Thread(target=self._check, name="disks", daemon=True)
            self._thread.start()
            if first:
                self._thread.join(FIRST_CHECK_TIMEOUT_S)
        return self._reports

    def _check(self) -> None:
        reports = [report for what, path in self._folders.items() if (report := _measure(what, path)) is not None]
        self._reports, self._checked_at = reports, time.monotonic()


def node_disks(artifact_root: str, worker_folder: Path) -> DiskMonitor:
    """The disks of a node; the artifact root only if it is a folder of this machine."""
    try:
        return DiskMonitor({"artifacts": file_url_path(artifact_root), "outbox": worker_folder})
    except OutsideRootError:
        return DiskMonitor({"outbox": worker_folder})


def _measure(what: str, path: Path) -> DiskReport | None:
    existing = path
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    try:
        usage = shutil.disk_usage(existing)
    except OSError as error:
        log.warning("disk_not_seen", what=what, path=str(existing), error=str(error))
        return None
    return DiskReport.model_validate({"what": what, "path": str(path), "free_bytes": usage.free, "total_bytes": usage.total})
