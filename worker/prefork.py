"""Starts supervisors and engines as forks of servers that have imported them (`oppo_contract.prefork`).

    agent ── server of `worker`      forks a supervisor for each launch order
      └───── server of `oppo_core`   forks an engine for it before the claim returns; the supervisor gets the job's socket

If a fork fails, the program is started cold. That starts nothing twice: every supervisor needs the attempt's lock and claim, and
an engine starts only on its supervisor's order. Servers end with the agent.

`multiprocessing.forkserver` is no replacement. It has one server per process, with the starter's environment, secrets included.
`start` waits for the server's imports without a timeout. Exit statuses pass through the server: if it is killed, all its forks
count as ended. All processes share a resource tracker, which keeps a killed engine's shared memory until the agent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from oppo_contract.lifeline import inherited_lifeline
from oppo_contract.prefork import PADDING, Order

ENGINE_JOB_FD = "OPPO_ENGINE_JOB_FD"  # for a supervisor: the socket of the engine's job
FORK_TIMEOUT_S = 2.0
RESTART_AFTER_S = 30.0  # after a server has ended
# Maximum age of a server, so that updated code is used without a restart of the worker.
REPLACE_AFTER_S = 3600.0
ANSWER_BYTES = 32
KILLED = -signal.SIGKILL

log = structlog.get_logger("worker.prefork")


class Fork:
    """A process that a server has forked, with the interface of `Popen`."""

    def __init__(self, job: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._job = job

    def fileno(self) -> int:
        """The job's socket, readable when the process has ended."""
        return self._job.fileno()

    def poll(self) -> int | None:
        """Exit status; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status, -9 if killed. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._job], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            self.returncode = _read_number(self._job, KILLED)
            self._job.close()
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


def run_fork(
    job: socket.socket,
    arguments: list[str],
    files: Mapping[str, int],
    environ: Mapping[str, str],
    folder: Path,
    grace_s: float | None = None,
) -> Fork | None:
    """Run the program in the fork of `job`; see `Order`. Returns None if there is no fork; then none will start later."""
    order = Order(arguments=arguments, environ=dict(environ), folder=str(folder), files=list(files), grace_s=grace_s)
    pid = 0
    try:
        if select.select([job], [], [], FORK_TIMEOUT_S)[0]:
            pid = _read_number(job, 0)
        if pid:
            socket.send_fds(job, [b"o"], list(files.values()))
            job.sendall(json.dumps(order).encode() + b"\n")
            return Fork(job, pid)
    except OSError as error:  # killed before it had received the order
        log.warning("fork_lost", pid=pid, error=str(error))
    job.close()
    return None


def _read_number(job: socket.socket, at_end: int) -> int:
    try:
        return int(job.recv(ANSWER_BYTES) or at_end)
    except ConnectionResetError:
        return at_end


class ForkServer:
    """The fork server of one package. Disabled if `environ` is None: then every start is cold."""

    def __init__(self, package: str, environ: Mapping[str, str] | None, folder: Path) -> None:
        self._package, self._environ, self._folder = package, environ, folder
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._started_at = float("-inf")

    def keep_alive(self) -> None:
        """Start the server if it does not run, at most every `RESTART_AFTER_S`; replace it when it is old."""
        age = time.monotonic() - self._started_at
        running = self._server is not None and self._server[0].poll() is None
        if self._environ is None or age < (REPLACE_AFTER_S if running else RESTART_AFTER_S):
            return
        self.stop()
        self._started_at = time.monotonic()
        control, theirs = socket.socketpair()
        lifeline = inherited_lifeline()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "oppo_contract.prefork", self._package, str(theirs.fileno()), PADDING],
                env=self._environ, cwd=self._folder, stdin=subprocess.DEVNULL, start_new_session=True,
                pass_fds=(theirs.fileno(),) if lifeline is None else (theirs.fileno(), lifeline),
            )  # fmt: skip
        self._server = process, control

    def fork(self) -> socket.socket | None:
        """Request a fork. Returns its job, or None if the server does not run or is still importing."""
        if self._server is None or not select.select([self._server[1]], [], [], 0)[0]:  # it sends a byte when ready
            return None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._server[1], [b"j"], [theirs.fileno()], socket.MSG_DONTWAIT)
            except OSError:  # ended, or hanging
                ours.close()
                self.stop()
                return None
        return ours

    def stop(self) -> None:
        """Kill the server, but not its forks."""
        if self._server is not None:
            process, control = self._server
            self._server = None
            control.close()
            process.kill()
            process.wait()


def start_supervisor(supervisors: ForkServer, engines: ForkServer, attempt_id: int, epoch: int) -> Fork | None:
    """Fork a supervisor with an engine's job. Returns None if it must be started cold."""
    job = supervisors.fork()
    if job is None:
        return None
    with engines.fork() or contextlib.nullcontext() as engine:
        files = {} if engine is None else {ENGINE_JOB_FD: engine.fileno()}
        fork = run_fork(job, ["supervise", str(attempt_id), str(epoch)], files, os.environ, Path.cwd())
    if fork is None:  # the server hangs
        supervisors.stop()
    return fork


def inherited_engine_job() -> socket.socket | None:
    """In a supervisor: the job of its engine, if any."""
    number = os.environ.pop(ENGINE_JOB_FD, None)
    return None if number is None else socket.socket(fileno=int(number))
