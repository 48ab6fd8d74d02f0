"""A tracker's library starts programs of its own. One that hangs holds nothing that the engine waits for."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from oppo_core.trackers.feed import Feed
from oppo_core.trackers.order import Order

STEPS, METRICS = 900, 100  # more than a pipe and what is read ahead hold


def step(number: int) -> str:
    metrics = {f"m{key}": 0.5 for key in range(METRICS)}
    axes = {"elapsed_s": 1.0, "generated_tokens": 1, "device_seconds": 1.0}
    return json.dumps({"kind": "step", "step": number, "time": 0.0, "metrics": metrics, **axes})


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_program_that_a_library_left_behind_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git hangs, on a file system that is gone, say, and outlives the tracker's process that asked it for the commit."""
    asked, git = tmp_path / "asked", tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\necho $$ > {asked}.new; mv {asked}.new {asked}\nexec sleep 120\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", f"{git.parent}:{os.environ['PATH']}")
    feed = Feed(Order("tensorboard", {"folder": "tb"}, {"name": "x"}, str(tmp_path / "out")))
    feed.put("started", json.dumps({"kind": "started", "start_step": 0}))
    for number in range(1, STEPS + 1):
        feed.put("step", step(number))
    wait_for(asked.exists)
    feed.end("succeeded")
    said: list[str] = []
    waiting = threading.Thread(target=lambda: said.extend(feed.wait(time.monotonic())), daemon=True)
    try:
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()
    finally:
        os.kill(int(asked.read_text()), signal.SIGKILL)
    assert f"{STEPS} of {STEPS} steps were left out of it" in said[-1]
