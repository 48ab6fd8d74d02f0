"""Folders that the platform wants deleted from this node's disk, because their run or checkpoint was.

Guarantee: each order is tried until it worked or failed, and is told either way with a heartbeat; the platform repeats what it
has not heard of. Nothing of a run is deleted while an attempt at it has files on this node. `oppo_contract.safe_delete` keeps it
within the artifact root.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import structlog

from oppo_contract.safe_delete import OutsideRootError, delete_run_folder
from oppo_contract.wire import DeletionOrder, DeletionResult

log = structlog.get_logger("worker.deletions")


class Deletions:
    """Deletes in a thread of its own, because a checkpoint may be large. Used by the agent's thread."""

    def __init__(self, root_url: str) -> None:
        self._root_url = root_url
        self._waiting: dict[int, DeletionOrder] = {}
        self._done: dict[int, DeletionResult] = {}
        self._told: list[int] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def done(self) -> list[DeletionResult]:
        """What became of orders since the last heartbeat that was answered."""
        with self._lock:
            self._told = list(self._done)
            return list(self._done.values())

    def obey(self, orders: Iterable[DeletionOrder], busy: set[int]) -> None:
        """The platform has heard what `done` said, and wants this.

        Args:
            orders: what to delete; what is under way is not begun again.
            busy: runs with an attempt here, which have to wait.
        """
        with self._lock:
            for told in self._told:
                self._done.pop(told, None)
            self._told = []
            for order in orders:
                if order.run_id not in busy and order.id not in self._done:
                    self._waiting.setdefault(order.id, order)
            if self._waiting and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="deletions", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                order = next(iter(self._waiting.values()), None)
                if order is None:
                    self._thread = None
                    return
            done = self._carried_out(order)
            with self._lock:
                self._done[order.id] = done
                del self._waiting[order.id]

    def _carried_out(self, order: DeletionOrder) -> DeletionResult:
        try:
            was_there = delete_run_folder(self._root_url, order.run_id, order.url)
        except (OutsideRootError, OSError) as error:
            log.warning("folder_not_deleted", run=order.run_id, url=order.url, error=str(error))
            return DeletionResult(id=order.id, error=str(error)[:2000])
        log.info("folder_deleted", run=order.run_id, url=order.url, was_there=was_there)
        return DeletionResult(id=order.id)
