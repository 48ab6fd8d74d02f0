"""Disk reports: folders that do not exist yet, the interval, and hanging file systems."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from worker import disks
from worker.disks import node_disks


def test_node_reports_artifact_and_outbox_disks(tmp_path: Path) -> None:
    told = node_disks((tmp_path / "not" / "yet").as_uri(), tmp_path / "worker").reports()
    assert [report.what for report in told] == ["artifacts", "outbox"]
    assert all(0 < report.free_bytes <= report.total_bytes for report in told)
    assert told[0].path == str(tmp_path / "not" / "yet")
    assert [report.what for report in node_disks("s3://bucket", tmp_path).reports()] == ["outbox"]


def test_hanging_disk_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, looks = threading.Event(), []

    def look(path: Path) -> None:
        looks.append(path)
        hangs.wait(20)
        raise OSError("stale")

    monkeypatch.setattr(disks.shutil, "disk_usage", look)
    monkeypatch.setattr(disks, "FIRST_CHECK_TIMEOUT_S", 0.01)
    watched = node_disks("", tmp_path)
    assert [watched.reports() for _ in range(5)] == [[]] * 5
    assert len(looks) == 1
    hangs.set()


def test_disks_are_measured_periodically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = node_disks("", tmp_path)
    first = watched.reports()
    assert first
    assert watched.reports() is first
    monkeypatch.setattr(disks, "CHECK_EVERY_S", 0.0)
    watched.reports()
    assert watched._thread is not None
    watched._thread.join(10)
    assert watched.reports() is not first
