"""A run of two processes on one node, with everything real: platform, supervisor, torchrun and gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]
LIMITS = {"OPPO_NODE_FRESH_S": "20", "OPPO_ORPHAN_GRACE_S": "3", "OPPO_REDISPATCH_S": "5", "OPPO_WARM": "0"}


@pytest.fixture(scope="module")
def platform(home: Path, tools: Any) -> Iterator[Any]:
    """A platform with one node."""
    with tools.running_platform(home, **LIMITS) as running:
        yield running


def spec(tools: Any, name: str, steps: int) -> dict[str, Any]:
    """A tiny run that shares the node's cores out among two ranks."""
    return tools.tiny_spec(name, steps, resources={"kind": "cpu", "processes": 2})


def ranks(platform: Any) -> list[psutil.Process]:
    """The run's processes, by their numbers."""
    found = {}
    for process in platform.below():
        try:
            line, environ = process.cmdline(), process.environ()
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if "oppo_core" in line and "torch.distributed.run" not in line and "LOCAL_RANK" in environ and "--events" in line:
            found[int(environ["LOCAL_RANK"])] = process
    return [found[number] for number in sorted(found)]


def test_two_processes_of_a_node_train_one_run(platform: Any, tools: Any) -> None:
    run_id = platform.submit(spec(tools, "two processes", 6))
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", (run["reason"], run["last_log_lines"])
    assert platform.steps_of(run_id) == list(range(1, 7))
    assert not ranks(platform)


def test_a_process_that_is_killed_ends_the_other_which_names_it_and_the_run_resumes(platform: Any, tools: Any) -> None:
    run_id = platform.submit(spec(tools, "one is killed", 40))
    platform.wait_for_step(run_id, 7)  # there is a checkpoint of step 5
    both = ranks(platform)
    assert len(both) == 2
    both[1].kill()
    tools.eventually(lambda: not any(process.is_running() for process in both), "both to end")
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", (run["reason"], run["last_log_lines"])
    assert platform.steps_of(run_id) == list(range(1, 41))
    told = platform.http.get(f"runs/{run_id}/events").text
    assert "RankError: rank 0 of 2" in told
    assert "rank 1 died" in told


def test_a_pause_saves_what_both_have_and_they_resume(platform: Any, tools: Any) -> None:
    run_id = platform.submit(spec(tools, "paused with two processes", 40))
    platform.wait_for_step(run_id, 3)
    assert platform.http.post(f"runs/{run_id}/pause").status_code == 200
    tools.eventually(lambda: platform.run(run_id)["state"] == "paused", "the pause")
    assert not ranks(platform)
    assert platform.run(run_id)["step"] < 40
    assert platform.http.post(f"runs/{run_id}/resume").status_code == 200
    assert platform.wait_for_end(run_id)["state"] == "succeeded"
    assert platform.steps_of(run_id) == list(range(1, 41))


def test_a_fork_goes_on_with_another_number_of_ranks(platform: Any, tools: Any) -> None:
    run_id = platform.submit(spec(tools, "of two ranks", 5))
    assert platform.wait_for_end(run_id)["state"] == "succeeded"
    alone = spec(tools, "of one rank", 8) | {"fork": {"run": run_id, "step": 5}, "resources": {"kind": "cpu"}}
    fork = platform.submit(alone)
    run = platform.wait_for_end(fork)
    assert run["state"] == "succeeded", (run["reason"], run["last_log_lines"])
    assert platform.steps_of(fork) == [6, 7, 8]
    assert "resources.processes: 2 → empty" in platform.http.get(f"runs/{fork}/logs.txt").text
