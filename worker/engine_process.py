"""Starts, stops and cleans up the engine: a process in its own session, below a guard, on the supervisor's lifeline."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from oppo_contract.lifeline import LIFELINE_FD, Lifeline, start_guarded
from oppo_contract.machine import write_private
from oppo_contract.wire import Claimed
from worker.artifacts import FileStore, check_manifest, url_path
from worker.devices import engine_environment
from worker.folders import AttemptFolder, NodeIdentity
from worker.prefork import Fork, run_fork
from worker.rendezvous import TORCHRUN, ranks_per_node, torchrun, torchrun_environ

# Overrides the engine's command line, for example to use another torch build.
ENGINE_COMMAND = "OPPO_ENGINE_COMMAND"
# Hidden from the engine, which needs no credentials of the platform; visible: settings of reward services and trackers.
HIDDEN_PREFIXES = ("DATABASE_URL", "REDIS_URL", "OPPO_", "DJANGO_")
VISIBLE_PREFIXES = ("OPPO_REWARD_", "OPPO_TRACKER_")
DEFAULT_ENGINE = [sys.executable, "-m", "oppo_core"]
# Read at the start of Python or the import of torch: secrets with such names need a cold start.
STARTUP_PREFIXES = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "PYTORCH", "CUDA", "NCCL_", "MALLOC_")
ENGINE_GRACE_S = 24 * 3600.0
KILL_TIMEOUT_S = 30.0
POLL_S = 0.05
# Set by torchrun for its processes, each of which has its own session.
TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"


def is_for_engine(variable: str) -> bool:
    """Whether the engine, which may run untrusted models and rules, inherits an environment variable."""
    return variable.startswith(VISIBLE_PREFIXES) or not variable.startswith(HIDDEN_PREFIXES)


def engine_environ() -> dict[str, str]:
    """This process's environment without hidden variables."""
    return {key: value for key, value in os.environ.items() if is_for_engine(key)} | {"PYTHONUNBUFFERED": "1"}


def engine_program() -> list[str]:
    """The start of the engine's command line."""
    return shlex.split(os.environ.get(ENGINE_COMMAND, "")) or DEFAULT_ENGINE


def engine_command(claimed: Claimed, folder: AttemptFolder, node: NodeIdentity) -> list[str]:
    """The engine's command line (docs/interfaces.md); writes its spec file.

    Raises:
        ArtifactError: the run's folder or the checkpoint to resume from is invalid.
        OSError: the artifact root is not accessible from this node.
    """
    store = FileStore(claimed.artifact_url)
    store.root.mkdir(parents=True, exist_ok=True)
    folder.spec_file.write_text(json.dumps(claimed.spec))
    command = [*engine_program(), "--spec", str(folder.spec_file), "--out", str(store.root)]
    command += ["--events", str(folder.engine_events)]
    for root in node.models_roots:
        command += ["--root", str(root)]
    if claimed.resume_from is not None:
        checkpoint = _checkpoint_folder(claimed.resume_from.url, store, node)
        check_manifest(checkpoint, claimed.resume_from.manifest_sha256)
        command += ["--resume-from", str(checkpoint)]
    resources = claimed.spec.get("resources")
    threads = resources.get("cpu_threads") if isinstance(resources, dict) else None
    command += ["--threads", str(threads)] if threads else []
    processes = ranks_per_node(claimed.spec)
    if processes == 1 and claimed.rendezvous is None:
        return command
    return torchrun(command, processes, claimed.rendezvous)


class EngineProcess:
    """A running engine and its descendants."""

    def __init__(
        self,
        command: list[str],
        folder: AttemptFolder,
        device_indices: list[int],
        secrets: Mapping[str, str],
        on_end: Callable[[], None],
        job: socket.socket | None = None,
    ) -> None:
        """Start `command`, in the fork of `job` if possible. After an OSError no process is left."""
        self._lifeline = Lifeline()
        environment = torchrun_environ(command) | engine_environ() | dict(secrets) | {"PYTHONUNBUFFERED": "1"}
        environment |= engine_environment(device_indices)
        below_torchrun = TORCHRUN in command  # torchrun closes inherited files; its engine ends with it
        forked: Fork | None = None
        with folder.log_file("stdout").open("ab") as output, folder.log_file("stderr").open("ab") as errors:
            can_fork = command[:3] == DEFAULT_ENGINE and not any(name.startswith(STARTUP_PREFIXES) for name in secrets)
            if job is not None and not can_fork:
                job.close()
            elif job is not None:
                files = {LIFELINE_FD: self._lifeline.fd, "stdout": output.fileno(), "stderr": errors.fileno()}
                forked = run_fork(job, command[3:], files, environment, folder.path, ENGINE_GRACE_S)
            self._guard = forked or start_guarded(
                command,
                self._lifeline.fd,
                grace_s=ENGINE_GRACE_S,
                env=environment if below_torchrun else self._lifeline.environ(environment),
                output=output,
                errors=errors,
                pass_lifeline=not below_torchrun,
                cwd=folder.path,
            )
        self._folder = folder.path
        try:
            write_private(folder.session_file, str(self._guard.pid))
        except OSError:  # after a crash, no other process could find the engine
            self.clean_up()
            raise
        self._on_end = on_end
        threading.Thread(target=self._wait, name="engine-end", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the engine's main process has ended."""
        return self._guard.returncode is not None

    @property
    def exit_code(self) -> int:
        """Exit status; 128 + n for signal n."""
        code = int(self._guard.returncode or 0)
        return code if code >= 0 else 128 - code

    def request_stop(self) -> None:
        """Send SIGTERM: the engine finishes the chunk, writes a checkpoint and exits.

        Below torchrun it is sent to the ranks directly: torchrun would kill them after 30 s and report a failure to other nodes.
        """
        ranks = [process for process in _below_torchrun(self._folder) if _session_of(process) == process.pid]
        for process in ranks:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        if not ranks:
            with contextlib.suppress(ProcessLookupError):  # ended just now
                self._guard.terminate()

    def kill(self) -> None:
        """Kill every process of the engine."""
        kill_session(self._guard.pid, self._folder)

    def clean_up(self) -> None:
        """After the end: close the lifeline and kill remaining descendants."""
        self._lifeline.close()
        kill_session(self._guard.pid, self._folder)

    def _wait(self) -> None:
        self._guard.wait()
        self._on_end()


def kill_session(session: int | None, folder: Path, *, only_in_folder: bool = False) -> None:
    """Kill every process of a session and the engine's processes in other sessions, and wait for their end.

    Args:
        session: session id, if known.
        folder: working directory of the engine's processes.
        only_in_folder: skip processes with another working directory, if the session id may have been reused.

    Raises:
        TimeoutError: a process does not end, because it hangs in the kernel.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    others: set[int] = set()
    while members := [*_session_members(session, folder if only_in_folder else None), *_in_other_sessions(folder, others)]:
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in members]} of the engine do not end")
        time.sleep(POLL_S)


def kill_leftover(folder: AttemptFolder) -> None:
    """Kill processes left by an engine whose supervisor was killed. Raises TimeoutError, as `kill_session`."""
    if folder.session_file.exists():
        kill_session(folder.session(), folder.path, only_in_folder=True)


def _session_members(session: int | None, working_folder: Path | None) -> list[psutil.Process]:
    members: list[psutil.Process] = []
    if session is None:
        return members
    for pid in psutil.pids():
        try:
            if os.getsid(pid) != session:  # checked first, because creating a `Process` is slow
                continue
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if working_folder is None or Path(process.cwd()) == working_folder:
                members.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return members


def _in_other_sessions(folder: Path, seen: set[int]) -> list[psutil.Process]:
    """Processes of an attempt's engine in other sessions: torchrun's, and their descendants even if torchrun has ended.

    Their working directory is the attempt's folder, and they write to its logs or share the session of a process that does. That
    also holds for programs that overwrite their environment, such as vLLM, and not for a user's shell in the folder.

    Args:
        folder: the attempt's folder.
        seen: session ids known so far; new ones are added.
    """
    here = [process for process in psutil.process_iter() if _works_in(process, folder)]
    seen.update(
        filter(None, (_session_of(process) for process in here if _started_by_torchrun(process) or _writes_logs(process, folder)))
    )
    return [process for process in here if _session_of(process) in seen]


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return Path(process.cwd()) == folder and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _writes_logs(process: psutil.Process, folder: Path) -> bool:
    """Whether stdout or stderr is a log of the engine; False without /proc."""
    logs = [str(AttemptFolder(folder).log_file(stream)) for stream in ("stdout", "stderr")]
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/{number}") in logs:
                return True
    return False


def _started_by_torchrun(process: psutil.Process) -> bool:
    try:
        return TORCHRUN_VARIABLE in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:  # ended
        return None


def _below_torchrun(folder: Path) -> list[psutil.Process]:
    """Processes started by torchrun in an attempt's folder."""
    return [process for process in psutil.process_iter() if _works_in(process, folder) and _started_by_torchrun(process)]


def _checkpoint_folder(url: str, store: FileStore, node: NodeIdentity) -> Path:
    """The folder of a checkpoint, which may be another run's, below the node's artifact root.

    Raises:
        FileNotFoundError: it is outside that root, such as after the platform moved: the node must join again, the run can wait.
    """
    root = (FileStore(node.artifact_root).root if node.artifact_root else store.root.parent).resolve()
    folder = url_path(url).resolve()
    if not folder.is_relative_to(root):
        raise FileNotFoundError(f"the checkpoint {url} is outside this node's artifact root, {root}; let the node join again")
    return folder
