"""Silence of the control plane and of a node, with everything real: who is away for how long decides whether an engine stops."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
# Every limit but the lease is a few seconds here. The supervisor stops its engine a third of a lease before its end.
LEASE_S = 24.0
LIMITS = {"OPPO_NODE_FRESH_S": "4", "OPPO_ORPHAN_GRACE_S": "3", "OPPO_REDISPATCH_S": "3", "OPPO_LEASE_S": str(LEASE_S)}


@pytest.fixture(scope="module")
def quick(home: Path, tools: Any) -> Iterator[Any]:
    """A platform with short limits."""
    with tools.running_platform(home, **LIMITS) as running:
        yield running


@contextmanager
def silenced(processes: list[psutil.Process]) -> Iterator[None]:
    """The processes stand still meanwhile, as if their machine were gone; what they hold open stays open."""
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def engines(platform: Any) -> set[int]:
    return {process.pid for process in platform.find("-m oppo_core", "--spec")}


def test_a_control_plane_that_is_away_longer_than_any_heartbeat_limit_stops_no_engine(quick: Any, tools: Any) -> None:
    run_id = quick.submit(tools.tiny_spec("control plane away", steps=100_000))
    quick.wait_for_step(run_id, 3)
    running = engines(quick)
    with silenced([*quick.find("oppo_cli web"), *quick.find("oppo_cli scheduler")]):
        time.sleep(LEASE_S / 2)  # three times as long as the longest limit, and shorter than the lease
    before = quick.run(run_id)["step"]
    quick.wait_for_step(run_id, before + 5)
    assert engines(quick) == running
    assert quick.run(run_id)["state"] == "running"
    assert quick.http.post(f"runs/{run_id}/cancel").status_code == 200
    quick.wait_for_end(run_id)
    steps = quick.steps_of(run_id)
    assert steps == list(range(1, len(steps) + 1))


def test_a_killed_scheduler_is_started_again_and_loses_nothing(quick: Any, tools: Any) -> None:
    first = quick.submit(tools.tiny_spec("scheduler killed", steps=60))
    quick.wait_for_step(first, 2)
    running = engines(quick)
    [scheduler] = quick.find("oppo_cli scheduler")
    scheduler.kill()
    second = quick.submit(tools.tiny_spec("after the scheduler died"))
    assert engines(quick) >= running or quick.run(first)["state"] == "succeeded"
    assert quick.wait_for_end(first)["state"] == "succeeded"
    assert quick.wait_for_end(second)["state"] == "succeeded"
    assert quick.steps_of(first) == list(range(1, 61))


def test_two_schedulers_at_once_place_every_run_once(quick: Any, tools: Any) -> None:
    environ = quick.find("oppo_cli scheduler")[0].environ()
    environ.pop("OPPO_LIFELINE_FD", None)
    second = subprocess.Popen([sys.executable, "-m", "oppo_cli", "scheduler"], env=environ, stdin=subprocess.DEVNULL)
    try:
        ids = [quick.submit(tools.tiny_spec(f"two schedulers {number}", steps=5)) for number in range(3)]
        for run_id in ids:
            assert quick.wait_for_end(run_id)["state"] == "succeeded"
            assert quick.steps_of(run_id) == list(range(1, 6))
        assert second.poll() is None
    finally:
        second.terminate()
        second.wait()


def test_a_node_that_falls_silent_comes_back_with_its_engine_running_and_the_run_goes_on(quick: Any, tools: Any) -> None:
    """Agent and supervisor stand still until the lease has run out, and their engine trains on meanwhile: it must be stopped."""
    run_id = quick.submit(tools.tiny_spec("silent node", steps=3000))
    quick.wait_for_step(run_id, 6)
    old = engines(quick)
    with silenced([*quick.find("worker agent"), *quick.find("worker supervise")]):
        tools.eventually(lambda: quick.run(run_id)["state"] == "queued", "the lease to run out")
        assert engines(quick) == old
    tools.eventually(lambda: not (engines(quick) & old), "the old engine to be stopped")
    quick.wait_for_step(run_id, 1)
    tools.eventually(lambda: quick.run(run_id)["state"] == "running", "the run to go on")
    assert quick.http.post(f"runs/{run_id}/cancel").status_code == 200
    assert quick.wait_for_end(run_id)["state"] == "cancelled"
    steps = quick.steps_of(run_id)
    assert steps == list(range(1, len(steps) + 1))
