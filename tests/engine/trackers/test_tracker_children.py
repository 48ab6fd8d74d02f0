"""A tracker's library starts programs of its own. One that hangs holds nothing that the engine waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.manager import TrackerProcess


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_program_that_a_library_left_behind_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git hangs, on a file system that is gone, say, and outlives the tracker's process that asked it for the commit."""
    asked, git, log = tmp_path / "asked", tmp_path / "bin" / "git", tmp_path / "events.jsonl"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\necho $$ > {asked}.new; mv {asked}.new {asked}\nexec sleep 120\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:{os.environ['PATH']}")
    log.write_text('{"kind": "started", "seq": 1, "start_step": 0}\n')
    said: list[str] = []
    config = TrackerConfig("tensorboard", {"folder": "tb"}, {"name": "x"}, str(tmp_path / "out"), str(log))
    process = TrackerProcess(config, said.append)
    wait_for(asked.exists)
    process.end("succeeded")
    waiting = threading.Thread(target=process.wait, args=(time.monotonic(), 900), daemon=True)
    try:
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
    finally:
        os.kill(int(asked.read_text()), signal.SIGKILL)
    assert "steps 1 to 900 were not sent" in said[-1]
