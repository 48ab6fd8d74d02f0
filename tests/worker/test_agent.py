"""The node agent: heartbeats, launches, shutdown."""

from __future__ import annotations

import errno
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from oppo_contract.machine import write_private
from oppo_contract.wire import Claimed, LaunchOrder
from worker import agent as node_agent
from worker import folders, supervisor
from worker.agent import Supervisors
from worker.catalogue import Catalogue
from worker.devices import device_reports
from worker.folders import AttemptFolder, SavedClaim, WorkerFolder


def test_agent_reports_devices_and_launches_unclaimed_attempts(bench, tools) -> None:
    attempt = bench.attempt(steps=10)
    bench.platform.launchable = [1]
    agent = bench.start("agent")
    tools.eventually(lambda: attempt.outcome, "an outcome")
    assert attempt.outcome["outcome"] == "succeeded"
    first = bench.platform.node_beats[0]
    assert first["devices"][0]["memory_bytes"] > 0
    assert tools.first_catalogue(bench) == []
    agent.terminate()
    assert agent.wait() == 0


def test_it_reports_running_attempts(bench, tools) -> None:
    bench.attempt(steps=100_000, step_s=0.02)
    bench.platform.launchable = [1]
    bench.start("agent")
    tools.eventually(lambda: bench.platform.node_beats and bench.platform.node_beats[-1]["attempts"])
    assert bench.platform.node_beats[-1]["attempts"] == [{"attempt_id": 1, "epoch": 1}]


def test_stopping_the_agent_saves_its_attempts_and_leaves_no_process(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    bench.platform.launchable = [1]
    agent = bench.start("agent")
    tools.eventually(lambda: attempt.running)
    below = psutil.Process(agent.pid).children(recursive=True)
    agent.terminate()
    assert agent.wait() == 0
    assert attempt.outcome["outcome"] == "preempted"
    assert not [process for process in below if process.is_running()]


def test_attempts_may_outlive_the_agent_and_the_next_one_finds_them(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    bench.platform.launchable = [1]
    agent = bench.start("agent", "--keep-attempts")
    tools.eventually(lambda: attempt.running)
    agent.terminate()
    assert agent.wait() == 0
    assert bench.engines()
    bench.platform.node_beats.clear()
    bench.start("agent")
    tools.eventually(lambda: bench.platform.node_beats and bench.platform.node_beats[-1]["attempts"])
    assert len(bench.engines()) == 1
    attempt.signal = "cancel"
    tools.eventually(lambda: attempt.outcome, "an outcome")
    assert attempt.outcome["outcome"] == "cancelled"


def test_new_supervisor_reports_after_a_killed_one(bench, tools) -> None:
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    bench.platform.launchable = [1]
    bench.start("agent")
    tools.eventually(lambda: len(attempt.kinds("step")) > 3)
    psutil.Process(bench.folder.attempt(1).supervisor_pid()).kill()
    tools.eventually(lambda: attempt.outcome, "an outcome")
    assert attempt.outcome["outcome"] == "node_failed"  # also when its engine was quick and saved before it went
    assert bench.platform.requests.count("attempts/1/claim") == 1


def test_first_heartbeat_after_restart_lists_unreported_attempts(bench, tools) -> None:
    """Otherwise the platform would end the attempt and reject its last events and newest checkpoints."""
    attempt = bench.attempt(steps=100_000, step_s=0.02)
    supervisor = bench.supervise()
    tools.eventually(lambda: len(attempt.kinds("step")) > 3)
    supervisor.kill()
    supervisor.wait()
    bench.start("agent")
    tools.eventually(lambda: attempt.outcome, "an outcome")
    assert bench.platform.node_beats[0]["attempts"] == [{"attempt_id": 1, "epoch": 1}]


def test_stuck_processes_make_devices_unhealthy(bench, tools) -> None:
    attempt = bench.attempt()
    folder = bench.folder.attempt(1)
    folder.path.mkdir(parents=True)
    claimed = Claimed(
        attempt_token="attempt", run_id=7, spec=attempt.spec, device_indices=[0], lease_s=900.0, artifact_url=attempt.artifact_url
    )
    write_private(folder.claim_file, SavedClaim(epoch=1, claimed=claimed).model_dump_json())
    folder.session_file.write_text(str(2**22 + 1))  # above every process id
    write_private(folder.stuck_file, "attempt 1 could not be cleaned up: processes [12] of the engine do not end")
    attempt.claimed = True
    bench.start("agent")
    tools.eventually(lambda: attempt.outcome, "the next supervisor to find nothing left, and to report")
    assert "[12]" in bench.platform.node_beats[0]["devices"][0]["health"]
    tools.eventually(lambda: bench.platform.node_beats[-1]["devices"][0]["health"] == "", "the device to be well")


def test_unkillable_engine_is_recorded_without_an_outcome(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = bench.attempt()
    monkeypatch.setenv("OPPO_HOME", str(bench.home))
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def hangs(_supervisor: supervisor.Supervisor) -> None:
        raise TimeoutError("processes [12] of the engine do not end")

    monkeypatch.setattr(supervisor.Supervisor, "run", hangs)
    assert supervisor.supervise(1, 1) == 1
    assert "[12]" in bench.folder.attempt(1).stuck()
    assert attempt.outcome is None


@pytest.mark.full
def test_a_changed_catalogue_is_reported(bench, tools, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    identity = bench.folder.identity()
    bench.folder.save_identity(identity.model_copy(update={"models_roots": [root]}))
    bench.start("agent")
    assert [(entry["id"], entry["rows"]) for entry in tools.first_catalogue(bench)] == [("prompts.jsonl", 2)]
    model = root / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 9}))

    def told() -> bool:
        beats = [beat["catalogue"] for beat in bench.platform.node_beats if beat["catalogue"] is not None]
        return any(entry["id"] == "tiny" for entry in beats[-1])

    tools.eventually(told, "the new model to be reported")


def test_agent_continues_while_the_platform_is_unreachable(bench, tools) -> None:
    agent = bench.start("agent")
    tools.eventually(lambda: bench.platform.node_beats)
    before = len(bench.platform.node_beats)
    bench.away(until=lambda: agent.poll() is None)
    tools.eventually(lambda: len(bench.platform.node_beats) > before)
    assert agent.poll() is None


@pytest.fixture
def supervisors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisors:
    """Supervisors of a node without fork servers."""
    monkeypatch.setenv("OPPO_WARM", "0")
    folder = WorkerFolder(tmp_path)
    return Supervisors(folder)


def no_more_processes(*_arguments: object, **_options: object) -> None:
    """`Popen` at a container's process limit."""
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def test_stopping_a_supervisor_that_has_just_ended(supervisors: Supervisors, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = 2**22 + 1  # above every process id
    attempt = supervisors.folder.attempt(1)
    with attempt.locked(1) as held:
        assert held
        attempt.lock_file.write_text(f"{gone} 1")
        supervisors.stop()
        read_lock = AttemptFolder._supervisor

        def goes(folder: AttemptFolder) -> tuple[int, int] | None:
            found = read_lock(folder)
            folder.remove()
            return found

        monkeypatch.setattr(AttemptFolder, "_supervisor", goes)
        supervisors.stop(LaunchOrder(attempt_id=1, epoch=1))
    supervisors.wait(0.0)
    assert not attempt.path.exists()


def test_failed_supervisor_start_is_retried(supervisors: Supervisors, monkeypatch: pytest.MonkeyPatch) -> None:
    order, started = LaunchOrder(attempt_id=1, epoch=1), []
    monkeypatch.setattr(node_agent, "RELAUNCH_AFTER_S", 0.0)
    monkeypatch.setattr(subprocess, "Popen", no_more_processes)
    supervisors.launch(order)
    assert not supervisors.children
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    supervisors.launch(order)
    assert [command[-3:] for command in started] == [["supervise", "1", "1"]]


def beats_of_one_here(bench: Any, monkeypatch: pytest.MonkeyPatch, most: int = 3) -> list[dict[str, Any]]:
    """Heartbeats of an agent in this process, which ends after this many."""
    for name in ("signal", "set_wakeup_fd"):
        monkeypatch.setattr(node_agent.signal, name, lambda *_, **__: None)
    monkeypatch.setattr(node_agent, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(subprocess, "Popen", no_more_processes)
    node = node_agent.NodeAgent(bench.folder, bench.folder.identity())

    def stop_later(_path: str, _body: dict[str, Any]) -> None:
        node.wake.stop_requested = len(bench.platform.node_beats) >= most - 1

    bench.platform.before = stop_later
    node.run(keep_attempts=True)
    return bench.platform.node_beats


def test_agent_without_processes_keeps_sending_heartbeats(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.attempt()
    bench.platform.launchable = [1]
    assert len(beats_of_one_here(bench, monkeypatch)) == 3


def test_hanging_models_root_does_not_stop_heartbeats(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(Catalogue, "_scan", lambda _self: goes_on.wait(60) and [])
    monkeypatch.setattr("worker.catalogue.FIRST_SCAN_TIMEOUT_S", 0.01)
    assert [beat["catalogue"] for beat in beats_of_one_here(bench, monkeypatch)] == [None] * 3
    goes_on.set()


def test_agent_without_join_prints_the_command(bench, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.start("agent", OPPO_HOME=str(tmp_path / "empty")).wait() == 2
    assert "oppo worker join" in capfd.readouterr().err


def test_agent_rejects_an_invalid_rendezvous_address(bench, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.start("agent", OPPO_RENDEZVOUS_PORTS="29500-29599,30000").wait() == 2
    assert "OPPO_RENDEZVOUS_PORTS is '29500-29599,30000'; it must be one port or one range" in capfd.readouterr().err


def test_a_node_without_gpus_is_one_cpu_device() -> None:
    devices = device_reports()
    if devices[0].kind == "cuda":
        pytest.skip("this machine has GPUs")
    assert len(devices) == 1
    assert devices[0].model
    assert devices[0].memory_bytes == psutil.virtual_memory().total


def test_the_folder_of_a_supervisor_that_ended_before_its_claim_is_removed(bench, tools) -> None:
    left, held, unreadable = (bench.folder.attempt(number) for number in (7, 8, 9))
    for attempt in (left, held, unreadable):
        with attempt.locked(1) as acquired:
            assert acquired
    (left.path / ".claim.json.1234").write_text("{")
    (unreadable.path / "claim.json.unreadable").write_text("{")
    with held.locked(1):
        bench.start("agent")
        tools.eventually(lambda: not left.path.exists(), "its folder to be deleted")
        assert held.path.exists()
    tools.eventually(lambda: not held.path.exists(), "the other folder to be deleted")
    assert unreadable.path.exists()


def test_a_lock_is_not_acquired_when_its_folder_was_deleted_meanwhile(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = bench.folder.attempt(7)
    monkeypatch.setattr(folders, "_try_lock", lambda _descriptor: attempt.remove() or True)
    with attempt.locked(1) as acquired:
        assert not acquired
