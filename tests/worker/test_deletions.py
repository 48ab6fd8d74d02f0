"""Deletion orders: results are repeated until acknowledged; folders of active runs are skipped."""

from __future__ import annotations

import time
from pathlib import Path

from oppo_contract.wire import DeletionOrder, DeletionResult
from worker.deletions import Deletions


def order(root: Path, number: int, run_id: int) -> DeletionOrder:
    """An order to delete a run's folder."""
    return DeletionOrder(id=number, run_id=run_id, url=(root / "runs" / str(run_id)).as_uri())


def told(deletions: Deletions, count: int) -> list[DeletionResult]:
    """The results, once there are `count`."""
    deadline = time.monotonic() + 10
    while len(found := deletions.results()) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_deletion_results_are_repeated_until_acknowledged(tmp_path: Path) -> None:
    for run_id in (1, 2, 3):
        (tmp_path / "runs" / str(run_id) / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "2" / "checkpoints" / "x").symlink_to("/")
    deletions = Deletions(tmp_path.as_uri())
    orders = [order(tmp_path, n, n) for n in (1, 2, 3)] + [order(tmp_path, 4, 9)]
    assert deletions.results() == []
    deletions.start(orders, busy={3})
    assert {each.id: each.error for each in told(deletions, 3)} == {1: "", 2: "", 4: ""}
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["3"]  # an attempt at it has files here
    assert len(deletions.results()) == 3  # the answer was lost: told again
    deletions.start([order(tmp_path, 3, 3)], busy=set())
    assert [each.id for each in told(deletions, 1)] == [3]
    deletions.start([], busy=set())
    assert deletions.results() == []


def test_failed_deletion_is_reported_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    deletions = Deletions((tmp_path / "root").as_uri())
    deletions.start([DeletionOrder(id=1, run_id=1, url=(tmp_path / "elsewhere").as_uri())], busy=set())
    assert "is not a folder of run 1" in told(deletions, 1)[0].error
    assert (tmp_path / "elsewhere").exists()
    deletions.start([order(tmp_path / "root", 2, 1)], busy=set())
    assert "No such file" in told(deletions, 1)[0].error
