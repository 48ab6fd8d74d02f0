"""The engine's process: in a session of its own, below a guard, on a lifeline that its supervisor holds."""

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
from worker.artifacts import ArtifactError, FileStore, check_manifest, path_of
from worker.devices import engine_environment
from worker.folders import AttemptFolder, NodeIdentity
from worker.prefork import Fork, run_fork
from worker.rendezvous import TORCHRUN, processes_of, threads_below, torchrun

# An engine may have an environment of its own, say another torch build.
ENGINE_COMMAND = "OPPO_ENGINE_COMMAND"
# What the engine must not see: it needs no access to anything but its files.
KEPT_FROM_ENGINE = ("DATABASE_URL", "REDIS_URL", "OPPO_", "DJANGO_")
# But for these: which reward services it may talk to, and their tokens; and which trackers.
MEANT_FOR_ENGINE = ("OPPO_REWARD_", "OPPO_TRACKER_")
OUR_ENGINE = [sys.executable, "-m", "oppo_core"]
# Variables that Python reads when it starts, or torch when it is imported. A secret with such a name has no effect on a fork.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "PYTORCH", "CUDA", "NCCL_", "MALLOC_")
PATIENT_S = 24 * 3600.0
GONE_WITHIN_S = 30.0
LOOK_AGAIN_S = 0.05
# What torchrun puts into the environment of the processes that it starts, each in a session of its own.
BELOW_TORCHRUN = "TORCHELASTIC_RUN_ID"


def is_for_engine(variable: str) -> bool:
    """Whether the engine, which runs models and rules of others, gets to see an environment variable."""
    return variable.startswith(MEANT_FOR_ENGINE) or not variable.startswith(KEPT_FROM_ENGINE)


def engine_environ() -> dict[str, str]:
    """This process's environment as far as the engine may see it."""
    return {key: value for key, value in os.environ.items() if is_for_engine(key)} | {"PYTHONUNBUFFERED": "1"}


def engine_program() -> list[str]:
    """What starts an engine."""
    return shlex.split(os.environ.get(ENGINE_COMMAND, "")) or OUR_ENGINE


def engine_command(claimed: Claimed, folder: AttemptFolder, node: NodeIdentity) -> list[str]:
    """The engine's command line (docs/interfaces.md); writes the spec file it names.

    Raises:
        ArtifactError: the run's folder or the checkpoint to resume from is not usable.
        OSError: they cannot be reached from here, or not now.
    """
    store = FileStore(claimed.artifact_url)
    store.root.mkdir(parents=True, exist_ok=True)
    folder.spec_file.write_text(json.dumps(claimed.spec))
    command = [
        *engine_program(),
        "--spec",
        str(folder.spec_file),
        "--out",
        str(store.root),
        "--events",
        str(folder.engine_events),
    ]
    for root in node.models_roots:
        command += ["--root", str(root)]
    if claimed.resume_from is not None:
        checkpoint = _checkpoint_folder(claimed.resume_from.url, store, node)
        check_manifest(checkpoint, claimed.resume_from.manifest_sha256)
        command += ["--resume-from", str(checkpoint)]
    resources = claimed.spec.get("resources")
    threads = resources.get("cpu_threads") if isinstance(resources, dict) else None
    command += ["--threads", str(threads)] if threads else []
    processes = processes_of(claimed.spec)
    if processes == 1 and claimed.rendezvous is None:
        return command
    return torchrun(command, processes, claimed.rendezvous)


class EngineProcess:
    """One engine, from start to the end of its last descendant."""

    def __init__(
        self,
        command: list[str],
        folder: AttemptFolder,
        device_indices: list[int],
        secrets: Mapping[str, str],
        on_end: Callable[[], None],
        job: socket.socket | None = None,
    ) -> None:
        """Start `command`, in the fork behind `job` if that can run it. Raises OSError; then no process is left."""
        self._lifeline = Lifeline()
        environment = threads_below(command) | engine_environ() | dict(secrets) | {"PYTHONUNBUFFERED": "1"}
        environment |= engine_environment(device_indices)
        below_torchrun = TORCHRUN in command  # it closes the pipe for its engine, which dies with it instead
        forked: Fork | None = None
        with folder.log_file("stdout").open("ab") as output, folder.log_file("stderr").open("ab") as errors:
            can_fork = command[:3] == OUR_ENGINE and not any(name.startswith(READ_EARLY) for name in secrets)
            if job is not None and not can_fork:
                job.close()
            elif job is not None:
                files = {LIFELINE_FD: self._lifeline.fd, "stdout": output.fileno(), "stderr": errors.fileno()}
                forked = run_fork(job, command[3:], files, environment, folder.path, PATIENT_S)
            self._guard = forked or start_guarded(
                command,
                self._lifeline.fd,
                grace_s=PATIENT_S,
                env=environment if below_torchrun else self._lifeline.environ(environment),
                output=output,
                errors=errors,
                pass_lifeline=not below_torchrun,
                cwd=folder.path,
            )
        self._home = folder.path
        try:
            write_private(folder.session_file, str(self._guard.pid))
        except OSError:  # nobody would find it after this process
            self.clear_away()
            raise
        self._on_end = on_end
        threading.Thread(target=self._wait, name="engine-end", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the engine's main process is gone."""
        return self._guard.returncode is not None

    @property
    def exit_code(self) -> int:
        """Its exit status; 128 + n when signal n ended it."""
        code = int(self._guard.returncode or 0)
        return code if code >= 0 else 128 - code

    def ask_to_stop(self) -> None:
        """SIGTERM: finish the chunk, write a checkpoint, leave.

        Below torchrun it goes to the engine itself: torchrun would wait for it half a minute at most, and would not tell other
        nodes that all is well.
        """
        ranks = [process for process in _below_torchrun(self._home) if _session_of(process) == process.pid]
        for process in ranks:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        if not ranks:
            with contextlib.suppress(ProcessLookupError):  # it has just ended; the thread that waits for it has yet to say so
                self._guard.terminate()

    def kill(self) -> None:
        """End every process of the engine at once."""
        kill_session(self._guard.pid, self._home)

    def clear_away(self) -> None:
        """After the end: make sure that no descendant is left on the devices, and let go of the lifeline."""
        self._lifeline.close()
        kill_session(self._guard.pid, self._home)

    def _wait(self) -> None:
        self._guard.wait()
        self._on_end()


def kill_session(session: int | None, home: Path, *, only_at_home: bool = False) -> None:
    """Kill every process of a session, and what the engine started outside of it, and wait until none is left.

    Args:
        session: its number, if it is known.
        home: the folder in which they work.
        only_at_home: spare processes that work elsewhere; for a number that may be somebody else's by now.

    Raises:
        TimeoutError: a process does not die (it hangs in the kernel).
    """
    deadline = time.monotonic() + GONE_WITHIN_S
    others: set[int] = set()
    while members := [*_members(session, home if only_at_home else None), *_in_other_sessions(home, others)]:
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {[process.pid for process in members]} of the engine do not end")
        time.sleep(LOOK_AGAIN_S)


def kill_leftover(folder: AttemptFolder) -> None:
    """End what an engine whose supervisor was killed may have left. Raises TimeoutError, as `kill_session`."""
    if folder.session_file.exists():
        kill_session(folder.session(), folder.path, only_at_home=True)


def _members(session: int | None, working_folder: Path | None) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    if session is None:
        return found
    for pid in psutil.pids():
        try:
            if os.getsid(pid) != session:  # asked first, because a `Process` reads files and there are hundreds
                continue
            process = psutil.Process(pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if working_folder is None or Path(process.cwd()) == working_folder:
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def _in_other_sessions(home: Path, seen: set[int]) -> list[psutil.Process]:
    """Processes of an attempt's engine wherever they are: below torchrun, and what those started, also if it has outlived them.

    They work in the attempt's folder, and write to its logs or are in the session of one that does. That stays true of a program
    that writes its title over its environment, as vLLM's does. Somebody who looks around in the folder does neither.

    Args:
        home: the attempt's folder.
        seen: their sessions so far; what is found now is added.
    """
    here = [process for process in psutil.process_iter() if _works_in(process, home)]
    seen.update(
        filter(None, (_session_of(process) for process in here if _is_of_torchrun(process) or _writes_logs(process, home)))
    )
    return [process for process in here if _session_of(process) in seen]


def _works_in(process: psutil.Process, home: Path) -> bool:
    try:
        return Path(process.cwd()) == home and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _writes_logs(process: psutil.Process, home: Path) -> bool:
    """Whether its standard streams are the engine's; False where there is no /proc."""
    logs = [str(AttemptFolder(home).log_file(stream)) for stream in ("stdout", "stderr")]
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/fd/{number}") in logs:
                return True
    return False


def _is_of_torchrun(process: psutil.Process) -> bool:
    try:
        return BELOW_TORCHRUN in process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:  # it ended since it was found
        return None


def _below_torchrun(home: Path) -> list[psutil.Process]:
    """Processes that torchrun started in an attempt's folder."""
    return [process for process in psutil.process_iter() if _works_in(process, home) and _is_of_torchrun(process)]


def _checkpoint_folder(url: str, store: FileStore, node: NodeIdentity) -> Path:
    if node.artifact_root:  # a fork resumes from another run's checkpoint
        return FileStore(node.artifact_root).folder(url)
    folder = path_of(url).resolve()
    if not folder.is_relative_to(store.root.parent):
        raise ArtifactError(f"{url} leads outside {store.root.parent}")
    return folder
