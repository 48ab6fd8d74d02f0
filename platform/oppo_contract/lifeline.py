"""Lifeline pipe: child processes end when their parent ends for any reason, `kill -9` included.

The parent holds the write end of a pipe; its descendants inherit the read end, whose number is in `OPPO_LIFELINE_FD`. Nothing is
written: end-of-file means that the parent is gone. Our programs call `watch_lifeline`; other programs (PostgreSQL, Valkey, an
engine) run below a guard, which is this file run as a script:

    python -I -S lifeline.py FD STOP_SIGNAL GRACE_S UID:GID|- PASS_LIFELINE program argument…

The guard watches the pipe, forwards stop signals, and exits with the program's status. On Linux the program also sets
PR_SET_PDEATHSIG (after dropping the uid, because setuid clears it), for the case that the guard dies. Standard library only: the
guard must start in milliseconds and stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

LIFELINE_FD = "OPPO_LIFELINE_FD"
LIFELINE_LOST = 113  # exit status of a process whose lifeline was closed
DEFAULT_GRACE_S = 20.0
PR_SET_PDEATHSIG = 1


class Lifeline:
    """The parent's end of the pipe. Its descendants end when it is closed or this process ends."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (default: this process's environment) plus the pipe's number; the child also needs `pass_fds=(fd,)`."""
        return {**(os.environ if base is None else base), LIFELINE_FD: str(self.fd)}

    def close(self) -> None:
        """End all descendants. Idempotent."""
        for fd in (self._write_fd, self.fd):
            if fd >= 0:
                os.close(fd)
        self._write_fd = self.fd = -1

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def inherited_lifeline() -> int | None:
    """File descriptor of the inherited pipe; None if there is none."""
    text = os.environ.get(LIFELINE_FD, "")
    if not text.isdigit():
        return None
    try:
        os.fstat(int(text))
    except OSError:  # the variable was inherited without the pipe
        return None
    return int(text)


def watch_lifeline(on_lost: Callable[[], None] | None = None) -> None:
    """Start a thread that ends this process when the inherited lifeline is closed, after calling `on_lost`."""
    fd = inherited_lifeline()
    if fd is None:
        return

    def wait() -> None:
        os.read(fd, 1)
        try:
            if on_lost is not None:
                on_lost()
        finally:
            os._exit(LIFELINE_LOST)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def start_guarded(
    argv: Sequence[str],
    lifeline_fd: int,
    *,
    stop_signal: signal.Signals = signal.SIGTERM,
    grace_s: float = DEFAULT_GRACE_S,
    user: tuple[int, int] | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | int | None = None,
    errors: IO[bytes] | int | None = subprocess.STDOUT,
    pass_lifeline: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a program below a guard, in a new session; it ends when `lifeline_fd` reaches end-of-file.

    Args:
        stop_signal: sent first; SIGKILL follows after `grace_s` seconds.
        user: (uid, gid); needs root.
        output, errors: as `stdout` and `stderr` of `Popen`; by default both go to `output`.
        pass_lifeline: let the program inherit the pipe, for its own children.

    Returns:
        The guard. Its exit status is the program's, or 128 + n for signal n. Terminating the guard stops the program.
    """
    identity = "-" if user is None else f"{user[0]}:{user[1]}"
    options = [str(lifeline_fd), str(int(stop_signal)), str(grace_s), identity, str(int(pass_lifeline))]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, *options, *argv],
        cwd=cwd,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        pass_fds=(lifeline_fd,),
        start_new_session=True,
    )


def die_with_parent(stop_signal: int) -> None:
    """On Linux, PR_SET_PDEATHSIG: the kernel sends `stop_signal` to this process when the thread that started it dies."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, stop_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _exec_program(argv: Sequence[str], user: str, stop_signal: int, guard_pid: int) -> None:
    """In the forked child: drop the uid, set the parent-death signal, exec the program. Never returns."""
    try:
        if user != "-":
            uid, gid = (int(part) for part in user.split(":"))
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        die_with_parent(stop_signal)
        if os.getppid() == guard_pid:  # else the guard died before `die_with_parent`
            os.execvp(argv[0], list(argv))  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error}\n")
        sys.stderr.flush()
    os._exit(127)


def _run_guard(pid: int, lifeline_fd: int, stop_signal: int, grace_s: float, wake_fd: int, signals: list[int]) -> int:
    """Wait for the program; stop it when the lifeline is closed or the guard is signalled. Returns the exit status."""
    kill_at = float("inf")
    stopping = False
    watched = [lifeline_fd, wake_fd]
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        ready, _, _ = select.select(watched, [], [], None if kill_at == float("inf") else max(0.0, kill_at - time.monotonic()))
        if wake_fd in ready:
            os.read(wake_fd, 512)
        lost = lifeline_fd in ready
        if lost:
            watched = [wake_fd]
        if (lost or signals) and not stopping:
            os.kill(pid, stop_signal)
            stopping = True
            kill_at = time.monotonic() + grace_s
        if lost:  # no parent is left to escalate a long grace period
            kill_at = min(kill_at, time.monotonic() + DEFAULT_GRACE_S)
        if time.monotonic() >= kill_at:
            os.kill(pid, signal.SIGKILL)
            kill_at = float("inf")


def guard(arguments: Sequence[str]) -> int:
    """Main program of the guard (module docstring). Returns the exit status."""
    fd, stop, grace, user, inherit, *program = arguments
    lifeline_fd, stop_signal = int(fd), int(stop)
    os.set_inheritable(lifeline_fd, inherit == "1")
    guard_pid = os.getpid()
    status = fork_guarded(lifeline_fd, stop_signal, float(grace))
    if status is None:
        _exec_program(program, user, stop_signal, guard_pid)
        return 127
    return status


def fork_guarded(lifeline_fd: int, stop_signal: int, grace_s: float) -> int | None:
    """Fork, and guard the child. The caller must be single-threaded.

    Returns:
        In the child: None, with default signal handlers. In the guard, after the child has ended: its exit status.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: signals.append(received))
    signal.signal(signal.SIGCHLD, lambda _received, _frame: None)
    pid = os.fork()
    if pid != 0:
        return _run_guard(pid, lifeline_fd, stop_signal, grace_s, wake_read, signals)
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.close(wake_read)
    os.close(wake_write)
    return None


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
