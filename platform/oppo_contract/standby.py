"""Interpreters that have their imports behind them: a parent imports once, and forks a child for every job.

    starter ── control ──▶ parent (imports done, one thread, does nothing but fork)
       └────── job ──────▶ child  (serves this one job, then ends)

Starting Python costs a supervisor half a second of processor time and an engine, which imports torch, two seconds; a fork costs
a hundredth of that, and shares the parent's memory. The parent starts no thread, opens no device and runs no job, so what
a child inherits is modules and nothing else. It ends when its starter does: `control` reaches its end of file.

A job is a stream socket. The child first says its process id; what follows is agreed between the two. A socket that ends without
a process id means that there is no child and never will be: start the cold way. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oppo_contract.lifeline import die_with_parent

READY = b"r"
MOST_FDS = 4
# The command line is overwritten in place, so the parent's must be as long as a child's will be.
ROOM = " " * 8000


def serve_forks(control_fd: int) -> socket.socket | None:
    """In the parent: fork a child for every job that comes.

    Returns:
        In a child its job, in a session of its own and with signals as a new program finds them; in the parent None, when its
        starter is gone.
    """
    control = socket.socket(fileno=control_fd)
    die_with_parent(signal.SIGKILL)  # a stopped process reads no end of file; forks do not inherit the wish
    gc.collect()
    gc.freeze()  # the collector would write to, and so copy, every page that the children share
    signal.signal(signal.SIGCHLD, lambda _number, _frame: _reap())
    try:
        control.sendall(READY)
        while (job := _next_job(control)) is not None:
            if _fork_for(job):
                control.close()
                return job
            job.close()
    except (BrokenPipeError, ConnectionResetError):  # the starter died meanwhile
        return None
    return None


def _next_job(control: socket.socket) -> socket.socket | None:
    data, fds, _, _ = socket.recv_fds(control, 1, 1)
    if not data:
        return None
    job = socket.socket(fileno=fds[0])
    job.set_inheritable(False)
    return job


def _fork_for(job: socket.socket) -> bool:
    """Whether this is the child. Without memory for one the job's socket simply ends."""
    try:
        if os.fork() != 0:
            return False
    except OSError as error:
        sys.stderr.write(f"standby: cannot fork: {error}\n")
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    with contextlib.suppress(BrokenPipeError):
        job.sendall(b"%d\n" % os.getpid())
    return True


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def send_order(job: socket.socket, order: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Tell a child what to do, as JSON, and pass it copies of open files. Raises OSError when it is gone."""
    body = json.dumps(order).encode()
    sent = socket.send_fds(job, [len(body).to_bytes(4, "big")], fds)
    assert sent == 4, "a stream socket takes four bytes at once"
    job.sendall(body)


def receive_order(job: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """In the child: the order and the files; None when the starter closed the job without one."""
    body = b""
    try:
        size, fds, _, _ = socket.recv_fds(job, 4, MOST_FDS)
        for fd in fds:
            os.set_inheritable(fd, False)
        expected = int.from_bytes(size, "big")
        while len(body) < expected and (part := job.recv(expected - len(body))):
            body += part
    except ConnectionResetError:  # closed before it had read our process id
        return None
    return (json.loads(body), fds) if body and len(body) == expected else None


def show_arguments(arguments: Sequence[str]) -> None:
    """Let `ps` show what this fork does now instead of its parent's command line. Does nothing where /proc does not tell how."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"\0".join(os.fsencode(argument) for argument in arguments)[: end - start - 1]
    if start and end > start:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))
