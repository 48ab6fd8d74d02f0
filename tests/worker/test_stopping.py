"""Starting, stopping and killing an engine while processes end and disks fill up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from oppo_contract.wire import AttemptOrders, Claimed
from worker import engine_process
from worker.engine_process import EngineProcess, kill_leftover
from worker.folders import AttemptFolder, NodeIdentity, SavedClaim, WorkerFolder
from worker.outcomes import build_outcome
from worker.supervisor import Supervisor

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    """An attempt's folder."""
    folder = WorkerFolder(tmp_path).attempt(17)
    folder.path.mkdir(parents=True)
    return folder


@pytest.fixture
def supervisor(folder: AttemptFolder, tmp_path: Path) -> Supervisor:
    """Its supervisor; the platform is unreachable."""
    artifacts = (tmp_path / "artifacts" / "1").as_uri()
    claimed = Claimed(attempt_token="t", run_id=1, spec={}, device_indices=[0], lease_s=900, artifact_url=artifacts)
    node = NodeIdentity(
        platform_url="http://127.0.0.1:9", name="n", node_id=1, node_token="node", queue="q", broker_url="redis://127.0.0.1:1/0"
    )
    return Supervisor(folder, SavedClaim(epoch=1, claimed=claimed), node)


@pytest.fixture
def engine(folder: AttemptFolder) -> Iterator[EngineProcess]:
    """An engine that only sleeps."""
    engine = EngineProcess(SLEEPS, folder, [], {}, lambda: None)
    yield engine
    engine.clean_up()


def test_stop_tolerates_processes_that_end_meanwhile(engine: EngineProcess, tools, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(SLEEPS)
    found = psutil.Process(child.pid)
    child.kill()
    child.wait()
    with monkeypatch.context() as at_once:
        at_once.setattr(engine_process, "_below_torchrun", lambda _home: [found])
        engine.request_stop()
    tools.eventually(lambda: engine.ended)


class Asked:
    """Counts stop requests."""

    def __init__(self) -> None:
        self.times = 0

    def request_stop(self) -> None:
        self.times += 1


def test_full_disk_does_not_prevent_a_stop(supervisor: Supervisor) -> None:
    supervisor.folder.supervisor_events.mkdir()  # nothing can be written to it
    supervisor.engine = engine = Asked()  # type: ignore[assignment]
    for _ in range(2):
        supervisor._apply_signal(AttemptOrders(lease_s=900, signal="pause", deadline_s=60))
    assert engine.times == 1
    assert supervisor.signal == "pause"
    assert supervisor.kill_at > time.monotonic() + 30


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts sleeping processes, by default in their own sessions; kills them afterwards."""
    started: list[subprocess.Popen[bytes]] = []

    def start(home: Path, writes: str | None, command: list[str] = SLEEPS) -> subprocess.Popen[bytes]:
        with home.joinpath(writes).open("ab") if writes else open(os.devnull, "ab") as out:
            started.append(subprocess.Popen(command, cwd=home, stdout=out, stderr=out, env={}, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


BELOW = "subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
TITLED = f"import subprocess, sys, time; {BELOW}; print('there', flush=True); time.sleep(600)"


@pytest.mark.parametrize("told", [True, False])
def test_processes_without_environment_are_killed_by_folder_and_logs(
    folder: AttemptFolder, start: Start, tools, told: bool
) -> None:
    left = start(folder.path, "stdout.log", [sys.executable, "-S", "-c", TITLED, *SLEEPS])  # as vLLM's, with one below it
    tools.eventually(lambda: b"there" in folder.log_file("stdout").read_bytes())
    below = psutil.Process(left.pid).children()
    other = folder.path.with_name("18")
    other.mkdir()
    spared = [start(folder.path, None), start(folder.path, "notes"), start(other, "stdout.log"), start(other, None)]
    folder.session_file.write_text(str(2**22 + 1) if told else "")  # nobody's any more
    kill_leftover(folder)
    assert left.wait(10) < 0
    assert len(below) == 1
    assert not below[0].is_running() or below[0].status() == psutil.STATUS_ZOMBIE
    assert [process.poll() for process in spared] == [None] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_failed_mount_ends_the_attempt_not_the_run(supervisor: Supervisor, tmp_path: Path, rank: int) -> None:
    tmp_path.joinpath("artifacts").write_text("in the place of a folder")
    supervisor.rank = rank
    supervisor._start_engine()
    assert supervisor.engine is None
    told = build_outcome(1, supervisor.folder.engine_end(), None, [])
    assert told.outcome == "node_failed"
    assert told.reason.startswith("the engine could not be started: [Errno 20] Not a directory")


def test_engine_is_killed_if_its_session_cannot_be_saved(folder: AttemptFolder) -> None:
    folder.session_file.joinpath("no file").mkdir(parents=True)
    with pytest.raises(OSError, match="session"):
        EngineProcess(SLEEPS, folder, [], {}, lambda: None)
    assert not [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder.path)]
