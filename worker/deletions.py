"""Deletes artifact folders of deleted runs and checkpoints on orders of the platform.

Guarantee: the result of each order is reported with a heartbeat; the platform repeats an order until then. Folders of a run are
not deleted while one of its attempts has files on this node. `oppo_contract.safe_delete` stays below the artifact root.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import structlog

from oppo_contract.safe_delete import OutsideRootError, delete_run_folder
from oppo_contract.wire import DeletionOrder, DeletionResult

log = structlog.get_logger("worker.deletions")


class Deletions:
    """Deletes folders in a thread, because a checkpoint may be large. Called from the agent's thread."""

    def __init__(self, root_url: str) -> None:
        self._root_url = root_url
        self._pending: dict[int, DeletionOrder] = {}
        self._results: dict[int, DeletionResult] = {}
        self._reported: list[int] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def results(self) -> list[DeletionResult]:
        """Results for the next heartbeat."""
        with self._lock:
            self._reported = list(self._results)
            return list(self._results.values())

    def start(self, orders: Iterable[DeletionOrder], busy: set[int]) -> None:
        """Called after a successful heartbeat: forget the reported results, and start the orders of the reply.

        Args:
            orders: all folders to delete; earlier orders that are not among them were withdrawn.
            busy: runs with an attempt on this node; their orders are skipped.
        """
        with self._lock:
            for number in self._reported:
                self._results.pop(number, None)
            self._reported = []
            chosen = [order for order in orders if order.run_id not in busy and order.id not in self._results]
            self._pending = {order.id: order for order in chosen}
            if self._pending and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._work, name="deletions", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                order = next(iter(self._pending.values()), None)
                if order is None:
                    self._thread = None
                    return
            result = self._delete(order)
            with self._lock:
                self._results[order.id] = result
                self._pending.pop(order.id, None)

    def _delete(self, order: DeletionOrder) -> DeletionResult:
        try:
            existed = delete_run_folder(self._root_url, order.run_id, order.url)
        except (OutsideRootError, OSError) as error:
            log.warning("folder_not_deleted", run=order.run_id, url=order.url, error=str(error))
            return DeletionResult(id=order.id, error=str(error)[:2000])
        log.info("folder_deleted", run=order.run_id, url=order.url, was_there=existed)
        return DeletionResult(id=order.id)
