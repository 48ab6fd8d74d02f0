"""A worker's disk that is full: the attempt ends by its node's fault, with the disk's name and the engine's own exit."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oppo_contract.events import FinishedEvent
from worker import outbox_limit
from worker.folders import EngineEnd
from worker.outbox_limit import OutboxLimit
from worker.outcomes import build_outcome, find_full_disk

FULL = os.strerror(errno.ENOSPC)
SMALL_DISK = 4 * 2**20


@pytest.fixture
def small_disk(bench: Any) -> Iterator[Path]:
    """The folder of attempts, on a file system of its own with little room."""
    place: Path = bench.folder.attempts_folder
    place.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> Path:
    """Fill the disk to the last byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as out, suppress(OSError):
        while out.write(bytes(4096)):
            continue
    assert shutil.disk_usage(disk).free == 0
    return filler


def test_engine_that_fills_the_disk_is_a_node_failure(bench, small_disk: Path) -> None:
    attempt = bench.attempt(steps=10_000, step_s=0, bulk=400)
    assert bench.supervise().wait() == 0
    assert (attempt.outcome["outcome"], attempt.outcome["exit_code"]) == ("node_failed", 1)
    said = rf"the disk of {small_disk / '1'} is too full, \d+ (bytes|KiB) of \d+ [KM]iB free: the engine exited with"
    assert re.match(said, attempt.outcome["reason"]), attempt.outcome["reason"]
    assert attempt.device_was_free
    assert len(attempt.kinds("step")) > 10, "what was written before is sent"
    assert not (small_disk / "1").exists()


def test_disk_that_is_full_before_the_start_gives_the_attempt_back(bench, small_disk: Path) -> None:
    attempt = bench.attempt(steps=3)
    filler = fill(small_disk)
    assert bench.supervise().wait() == 0
    assert attempt.outcome["outcome"] == "node_failed"
    assert FULL in attempt.outcome["reason"]
    assert "is too full" in attempt.outcome["reason"]
    filler.unlink()
    again = bench.attempt(2, steps=3)
    assert bench.supervise(2).wait() == 0
    assert again.outcome["outcome"] == "succeeded"


def test_disk_that_fills_up_while_the_engine_trains_and_has_room_again(bench, small_disk: Path, tools) -> None:
    """A success is a success although its end could not be saved."""
    attempt = bench.attempt(steps=60, step_s=0.05)
    process = bench.supervise()
    tools.eventually(lambda: len(attempt.kinds("step")) > 5)
    end_file = bench.folder.attempt(1).end_file
    end_file.mkdir()  # only the end cannot be written
    (end_file / "in the way").touch()
    assert process.wait() == 0
    assert attempt.outcome["outcome"] == "succeeded"


def test_a_full_disk_is_remembered_for_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, now = [0, 2**40, 2**40], [100.0]
    monkeypatch.setattr(outbox_limit.shutil, "disk_usage", lambda _path: SimpleNamespace(free=free.pop(0)))
    monkeypatch.setattr(outbox_limit.time, "monotonic", lambda: now[0])
    limit = OutboxLimit(tmp_path / "full")
    assert not limit.disk_was_full()
    limit.update(0)
    limit.update(0)
    assert limit.disk_was_full()
    now[0] += outbox_limit.RECENT_S
    assert not limit.disk_was_full()
    monkeypatch.undo()
    assert find_full_disk([], [tmp_path], was_full=True) == f"the disk of {tmp_path} was full shortly before"


def test_only_a_failure_is_blamed_on_the_disk(tmp_path: Path) -> None:
    disk = find_full_disk([f"OSError: [Errno 28] {FULL}"], [tmp_path, tmp_path / "missing"])
    assert disk.startswith(f"the disk of {tmp_path} is too full, ")
    assert find_full_disk(["DiskFullError: no room for a checkpoint in /out: it needs about 9 MiB"], [tmp_path]) == disk
    assert find_full_disk(["RuntimeError: the loss is not finite"], [tmp_path]) == ""
    done = FinishedEvent(producer="engine", seq=1, time=0.0, outcome="succeeded", step=3, reason="all steps are done")
    assert build_outcome(1, EngineEnd(exit_code=0), done, [], disk_full=disk).outcome == "succeeded"
    assert build_outcome(1, EngineEnd(exit_code=0, signal="pause"), None, [], disk_full=disk).outcome == "paused"
    failed = done.model_copy(update={"outcome": "failed", "reason": FULL})
    told = build_outcome(1, EngineEnd(exit_code=1), failed, [], disk_full=disk)
    assert (told.outcome, told.reason) == ("node_failed", f"{disk}: {FULL}")
