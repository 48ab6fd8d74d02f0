"""The supervisor's side of a warm start: an engine's guard that was forked beforehand and waits for its order."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import structlog

from oppo_contract.standby import send_order

BEGINS_WITHIN_S = 1.0
ANSWER_BYTES = 32
KILLED = -signal.SIGKILL
# Read when an interpreter starts or imports torch: with a secret of such a name only a cold start does what it says.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH", "PYTORCH", "CUDA", "NCCL_", "MALLOC_")

log = structlog.get_logger("worker.warm")


class WarmGuard:
    """What `EngineProcess` needs of a guard, as of the `Popen` of a cold one."""

    def __init__(self, job: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._job = job

    def wait(self) -> int:
        """Its exit status, which is the engine's. A guard that was killed says none; the engine dies with it."""
        told = b""
        try:
            while part := self._job.recv(ANSWER_BYTES):
                told += part
        except ConnectionResetError:
            told = b""
        self.returncode = int(told) if told.endswith(b"\n") else KILLED
        self._job.close()
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM to the guard, which passes it on."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)


def start_warm(
    job: socket.socket,
    arguments: list[str],
    environ: Mapping[str, str],
    folder: Path,
    lifeline_fd: int,
    logs: tuple[IO[bytes], IO[bytes]],
    grace_s: float,
) -> WarmGuard | None:
    """Start the engine that waits behind `job`; None when none does, and then it will not start any more either."""
    pid = _pid_of(job)
    if pid is None:
        job.close()
        return None
    order = {"arguments": arguments, "environment": dict(environ), "cwd": str(folder), "grace_s": grace_s}
    try:
        send_order(job, order, [lifeline_fd, *(log_file.fileno() for log_file in logs)])
    except OSError as error:  # killed this very moment, before it had the whole order
        log.warning("warm_engine_lost", error=str(error))
        job.close()
        return None
    return WarmGuard(job, pid)


def _pid_of(job: socket.socket) -> int | None:
    ready, _, _ = select.select([job], [], [], BEGINS_WITHIN_S)
    try:
        told = job.recv(ANSWER_BYTES) if ready else b""
    except ConnectionResetError:
        return None
    return int(told) if told else None
