"""Deletion orders: results are repeated until acknowledged; folders of active runs are skipped."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from oppo_contract.safe_delete import delete_run_folder
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


def test_an_order_that_the_platform_no_longer_gives_is_not_carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retried run may have written the folder again while an earlier deletion took long."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(root_url: str, run_id: int, url: str) -> bool:
        begun.set()
        go_on.wait()
        return delete_run_folder(root_url, run_id, url)

    monkeypatch.setattr("worker.deletions.delete_run_folder", slow)
    for run_id in (1, 2):
        (tmp_path / "runs" / str(run_id)).mkdir(parents=True)
    deletions = Deletions(tmp_path.as_uri())
    deletions.start([order(tmp_path, 1, 1), order(tmp_path, 2, 2)], busy=set())
    begun.wait()
    deletions.start([order(tmp_path, 1, 1)], busy=set())
    go_on.set()
    assert [result.id for result in told(deletions, 1)] == [1]
    deletions.start([], busy=set())
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["2"]
