"""An engine that has torch imported and nothing else: `python -m oppo_core --standby FD`, forked once for every attempt.

    parent ── fork ──▶ guard ── fork ──▶ engine        the guard is what `oppo_contract.lifeline` runs for a cold start

The forked engine goes on as if this interpreter had been started with the order's arguments, environment and folder: the same
session, guard, lifeline, log files and exit status. Nothing of CUDA may be touched before the fork, and no thread started.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import socket
import sys
from typing import Any

from oppo_contract.lifeline import LIFELINE_FD, die_with_parent, fork_guarded
from oppo_contract.standby import receive_order, serve_forks, show_arguments

PROGRAM = (sys.executable, "-m", "oppo_core")


def wait_for_an_attempt(control_fd: int) -> list[str]:
    """Import, then wait. Returns only in a fork that has become an engine, with its arguments."""
    _import_engine()
    show_arguments([*PROGRAM, "--standby", "ready"])
    job = serve_forks(control_fd)
    if job is None:
        os._exit(0)
    received = receive_order(job)
    if received is None:  # the attempt was not ours after all
        os._exit(0)
    order, fds = received
    show_arguments([*PROGRAM, "--guard"])
    return _become_engine(order, fds, job)


def _import_engine() -> None:
    import torch
    import torch._dynamo  # every optimizer of torch wants it when it is made, and it takes longer than torch itself

    import oppo_core.cli
    import oppo_core.engine.build
    import oppo_core.engine.preflight
    import oppo_core.train  # noqa: F401 - so that the forks have it

    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert not begun, "a CUDA context does not survive a fork"


def _become_engine(order: dict[str, Any], fds: list[int], job: socket.socket) -> list[str]:
    """In the fork: split into guard and engine; returns in the engine."""
    lifeline_fd, *logs = fds
    for number, fd in enumerate(logs, start=1):
        os.dup2(fd, number)
        os.close(fd)
    _move_to(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environment"] | {LIFELINE_FD: str(lifeline_fd)})
    os.set_inheritable(lifeline_fd, True)
    guard_pid = os.getpid()
    status = fork_guarded(lifeline_fd, signal.SIGTERM, order["grace_s"])
    if status is not None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor is gone, and so is the engine
            job.sendall(b"%d\n" % status)
        os._exit(status)
    job.close()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != guard_pid:  # it died before the wish was made
        os._exit(127)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments: list[str] = order["arguments"]
    sys.argv[1:] = arguments
    show_arguments([*PROGRAM, *arguments])
    return arguments


def _move_to(folder: str) -> None:
    """Work in a folder as if Python had been started there; processes that the engine spawns shall too."""
    before = os.getcwd()
    os.chdir(folder)
    sys.path[:] = [folder if entry == before else entry for entry in sys.path]
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
