"""The main job with everything real: API → queue → worker → engine → metrics, and what happens when parts are killed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.processes import gone

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(600)


def test_a_run_goes_from_submit_to_succeeded_and_leaves_nothing_when_it_is_deleted(platform, home: Path, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("first"))
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", run
    assert run["step"] == 12
    assert platform.steps_of(run_id) == list(range(1, 13))
    timeline = platform.get(f"runs/{run_id}/timeline")
    assert timeline["lanes"]
    assert timeline["steps"]
    tools.eventually(lambda: platform.get(f"runs/{run_id}/storage")["parts"]["checkpoints"], "its checkpoints to be counted")
    folder = home / "artifacts" / "runs" / str(run_id)
    assert folder.is_dir()
    assert platform.http.delete(f"runs/{run_id}").status_code == 200
    assert platform.http.post(f"runs/{run_id}/purge").status_code == 204
    tools.eventually(lambda: not folder.exists(), "its folder to be deleted")
    tools.eventually(lambda: platform.get("trash")["items"] == [], "the trash to be empty")
    left = "its node to have deleted what it had"
    tools.eventually(lambda: all(team["to_delete"] == [] for team in platform.get("storage")["items"]), left)


def test_a_second_up_in_the_same_home_is_refused(platform, home: Path, tools) -> None:
    second = tools.oppo(home, "up")
    assert second.returncode == 1
    assert "already runs" in second.stderr
    assert platform.base_url in second.stderr


@pytest.mark.full
def test_a_port_that_another_platform_holds_is_named_and_nobody_joins_there(platform, tmp_path: Path, tools) -> None:
    with tools.cleared(tmp_path / "second") as second_home:
        second = tools.oppo(second_home, "up", "--port", platform.base_url.rpartition(":")[2])
    assert second.returncode == 1
    assert "is used by another program" in second.stderr
    assert "join" not in second.stderr


@pytest.mark.full
def test_a_killed_engine_resumes_and_no_point_is_lost(platform, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("killed engine", steps=120))
    platform.wait_for_step(run_id, 8)
    [engine] = platform.find("-m oppo_core", "--spec")[:1]
    engine.kill()
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", run
    assert platform.steps_of(run_id) == list(range(1, 121))


@pytest.mark.full
def test_a_killed_broker_costs_nothing(platform, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("killed broker", steps=60))
    platform.wait_for_step(run_id, 2)
    [broker] = platform.find("valkey-server")
    broker.kill()
    assert platform.wait_for_end(run_id)["state"] == "succeeded"
    assert platform.steps_of(run_id) == list(range(1, 61))
    tools.eventually(lambda: platform.find("valkey-server"), "Valkey to be restarted")
    assert platform.wait_for_end(platform.submit(tools.tiny_spec("after the broker died")))["state"] == "succeeded"


@pytest.mark.full
def test_a_database_that_another_program_shuts_down_is_started_again(platform, tools) -> None:
    """SIGTERM to PostgreSQL itself waits for its clients, whose pools keep their connections."""
    [before, *_] = [process for process in platform.find("postgres", "-D") if process.name() == "postgres"]
    before.terminate()
    tools.eventually(lambda: not before.is_running(), "the server to end")
    platform.get("runs")  # asked until it is back
    assert platform.wait_for_end(platform.submit(tools.tiny_spec("after the shutdown")))["state"] == "succeeded"


@pytest.mark.full
def test_a_killed_web_process_loses_nothing(platform, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("killed web", steps=100))
    platform.wait_for_step(run_id, 2)
    [web] = platform.find("oppo_cli web")
    web.kill()
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", run
    assert platform.steps_of(run_id) == list(range(1, 101))


@pytest.mark.full
def test_a_killed_supervisor_takes_its_engine_along_and_the_run_goes_on(platform, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("killed supervisor", steps=120))
    platform.wait_for_step(run_id, 6)
    engines = platform.find("-m oppo_core", "--spec")
    [supervisor] = platform.find("worker supervise")
    supervisor.kill()
    tools.eventually(lambda: not any(engine.is_running() for engine in engines), "the engine to die")
    run = platform.wait_for_end(run_id)
    assert run["state"] == "succeeded", run
    assert platform.steps_of(run_id) == list(range(1, 121))


@pytest.mark.full
def test_cancel_ends_the_engine_and_frees_the_device(platform, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("cancelled", steps=100_000))
    platform.wait_for_step(run_id, 2)
    assert platform.http.post(f"runs/{run_id}/cancel").status_code == 200
    assert platform.wait_for_end(run_id)["state"] == "cancelled"
    assert not platform.find("-m oppo_core", "--spec")
    assert platform.wait_for_end(platform.submit(tools.tiny_spec("after a cancel")))["state"] == "succeeded"


@pytest.mark.full
def test_a_fork_trains_the_numbers_of_the_run_that_it_came_from(platform, tools) -> None:
    kept = {"every_steps": 4, "keep": 3}
    parent = platform.submit(tools.tiny_spec("parent", steps=12, checkpoints=kept))
    assert platform.wait_for_end(parent)["state"] == "succeeded"
    steps = [saved["step"] for saved in platform.get(f"runs/{parent}/checkpoints")["items"]]
    assert 4 in steps
    fork = platform.submit(tools.tiny_spec("fork", steps=12, checkpoints=kept, fork={"run": parent, "step": 4}))
    run = platform.wait_for_end(fork)
    assert (run["state"], run["forked_from"]) == ("succeeded", {"run": parent, "step": 4}), run
    assert platform.steps_of(fork) == list(range(5, 13))
    keys = "critic/score/mean,objective/kl,actor/pg_loss"
    ours, theirs = (platform.get(f"runs/{run_id}/metrics", keys=keys, since_step=4)["series"] for run_id in (fork, parent))
    assert {key: column["y"] for key, column in ours.items()} == {key: column["y"] for key, column in theirs.items()}


@pytest.mark.full
def test_non_finite_loss_ends_the_run_with_an_alert(platform, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("not finite", ppo={"batch_size": 8, "missing_eos_penalty": 1e30}))
    assert platform.wait_for_end(run_id)["state"] == "failed"
    alerts = tools.eventually(lambda: platform.get("alerts", run=run_id)["items"], "alerts")
    assert [alert["condition"] for alert in alerts] == ["failed", "not_finite"]
    assert "the value loss is inf at step 1" in alerts[0]["why"]


@pytest.mark.full
def test_kill_of_the_parent_leaves_no_orphan_and_the_next_start_recovers(platform, home: Path, tools) -> None:
    run_id = platform.submit(tools.tiny_spec("interrupted", steps=80))
    platform.wait_for_step(run_id, 8)
    below = platform.below()
    platform.process.kill()
    platform.process.wait()
    tools.eventually(lambda: all(map(gone, below)), "every process to end")
    with tools.running_platform(home) as again:
        assert again.base_url == platform.base_url
        run = again.wait_for_end(run_id)
        assert run["state"] == "succeeded", json.dumps(run)
        assert again.steps_of(run_id) == list(range(1, 81))
