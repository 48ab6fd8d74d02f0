"""Fork server: an interpreter that has imported a program, and forks a process for each start of the program.

    starter ── control ──▶ server  (imports done, one thread)
       └────── job ──────▶ fork    (runs the program once)

Starting Python costs a supervisor 0.5 s of CPU time, and an engine, which imports torch, 2 s; a fork costs 1 % of that and shares
memory with the server. The server starts no threads, opens no devices and runs nothing itself, so a fork inherits modules only.
The server ends when `control` reaches end-of-file.

A job is a stream socket. The fork sends its process id, receives its order (one byte with the open files, then a line of JSON),
runs the program as `python -m PACKAGE ARGUMENTS` would, and sends the exit status. If the socket closes before a process id is
sent, there is no fork: start the program cold. `worker.prefork` is the starter. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing.process
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TypedDict

from oppo_contract.lifeline import LIFELINE_FD, die_with_parent, fork_guarded

MAX_FILES = 4
STREAMS = {"stdout": 1, "stderr": 2}
# Last argument of a server: `show_command_line` overwrites the command line in place, so the server's limits its length.
PADDING = " " * 8000


class Order(TypedDict):
    """What a fork runs. The open files are sent with it, in the order of `files`."""

    arguments: list[str]
    environ: dict[str, str]
    folder: str  # working directory
    files: list[str]  # `stdout`, `stderr`, or the environment variable for the descriptor's number
    grace_s: float | None  # run below a guard (oppo_contract.lifeline), with these seconds from SIGTERM to SIGKILL


def serve(package: str, control_fd: int) -> int:
    """Import the program and fork until the starter ends; in a fork, run the program. Returns the exit status.

    `PACKAGE.__main__` needs `preload()`, which imports the program's modules, and `main(arguments) -> status`.
    """
    variables = set(os.environ)
    program = importlib.import_module(f"{package}.__main__")
    program.preload()
    set_by_imports = {name: value for name, value in os.environ.items() if name not in variables}
    show_command_line("oppo_contract.prefork", package, "ready")
    job = _fork_per_job(socket.socket(fileno=control_fd))
    received = None if job is None else _receive_order(job)
    if job is None or received is None:
        return 0
    order, files = received
    _apply_order(order, files, set_by_imports)
    if order["grace_s"] is not None:
        _split_off_guard(package, job, order["grace_s"])
    show_command_line(package, *order["arguments"])
    sys.argv[1:] = order["arguments"]
    sys.modules["__main__"] = program  # `multiprocessing` children import their target from here
    status: int = program.main(order["arguments"])
    _send_status(job, status)
    return status


def _fork_per_job(control: socket.socket) -> socket.socket | None:
    """Fork for every job. Returns the job in a fork, in a new session; None in the server when the starter has ended."""
    die_with_parent(signal.SIGKILL)  # a SIGSTOPped server does not see end-of-file; forks do not inherit this
    gc.collect()
    gc.freeze()  # garbage collection would write to shared pages and so copy them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks
    with control, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        control.sendall(b"r")  # ready
        while received := socket.recv_fds(control, 1, 1)[1]:
            job = socket.socket(fileno=received[0])
            job.set_inheritable(False)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                _send_status(job, os.getpid())
                return job
            job.close()
    return None


def _receive_order(job: socket.socket) -> tuple[Order, list[int]] | None:
    """The order and its files; None if the starter closed the job."""
    try:
        files = socket.recv_fds(job, 1, MAX_FILES)[1]
        with job.makefile("rb") as lines:
            line = lines.readline()
    except ConnectionResetError:  # closed before reading our process id
        return None
    return (json.loads(line), files) if line.endswith(b"\n") else None


def _apply_order(order: Order, files: list[int], set_by_imports: dict[str, str]) -> None:
    """Set environment, files and folder as in a cold start. Variables set by imports are retained."""
    os.environ.clear()
    os.environ.update(set_by_imports | order["environ"])
    for name, fd in zip(order["files"], files, strict=True):
        if name in STREAMS:
            os.dup2(fd, STREAMS[name])
            os.close(fd)
        else:
            os.environ[name] = str(fd)
    old, folder = os.getcwd(), order["folder"]
    os.chdir(folder)
    sys.path[:] = [folder if entry == old else entry for entry in sys.path]
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]


def _split_off_guard(package: str, job: socket.socket, grace_s: float) -> None:
    """Fork again, and return in the child; the parent is its guard (`oppo_contract.lifeline`) and exits here."""
    show_command_line(package, "--guard")
    guard_pid = os.getpid()
    status = fork_guarded(int(os.environ[LIFELINE_FD]), signal.SIGTERM, grace_s)
    if status is not None:
        _send_status(job, status)
        os._exit(status)
    job.close()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != guard_pid:  # the guard ended before `die_with_parent`
        os._exit(127)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _send_status(job: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the starter has ended, or the guard owns the job
        job.sendall(b"%d\n" % number)


def show_command_line(*words: str) -> None:
    """Make `ps` show `python -m WORDS` instead of the server's command line. Does nothing without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"\0".join(os.fsencode(word) for word in (sys.executable, "-m", *words))[: end - start - 1]
    if start and end > start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))


if __name__ == "__main__":
    sys.exit(serve(sys.argv[1], int(sys.argv[2])))
