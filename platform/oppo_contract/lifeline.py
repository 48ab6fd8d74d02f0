"""How a process of ours ends with the process that answers for it, however that one ends, `kill -9` included.

The answering process keeps the writing end of a pipe; everybody below it inherits the reading end, whose number stands in
`OPPO_LIFELINE_FD`. Nothing is ever written: the end-of-file is the message. Our own programs listen with `watch_lifeline`;
programs of others (PostgreSQL, Valkey, an engine) run below a guard, which is this very file run as a script:

    python -I -S lifeline.py --fd N --stop INT [--user UID:GID] -- program argument…

The guard listens in the program's place, passes its own stop signal on, and ends with the program's exit status. On Linux the
program also asks the kernel to be signalled when its guard dies (after the uid is dropped, because setuid clears that wish).
Standard library only: the guard must start in milliseconds and stay small.
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
LIFELINE_LOST = 113  # exit status of a process whose lifeline was cut
DEFAULT_GRACE_S = 20.0
PR_SET_PDEATHSIG = 1


class Lifeline:
    """The pipe that one process holds for all below it. Closing it, or dying, ends them."""

    def __init__(self) -> None:
        self.fd, self._held = os.pipe()

    def environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """`base` (default: this process's environment) with the pipe's number in it; pass `fd` on with `pass_fds`."""
        return {**(os.environ if base is None else base), LIFELINE_FD: str(self.fd)}

    def close(self) -> None:
        """End everybody below. Harmless when it is cut already."""
        for fd in (self._held, self.fd):
            if fd >= 0:
                os.close(fd)
        self._held = self.fd = -1

    def __enter__(self) -> Lifeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def inherited_lifeline() -> int | None:
    """Number of the pipe this process was started with, or None when nobody answers for it."""
    text = os.environ.get(LIFELINE_FD, "")
    if not text.isdigit():
        return None
    try:
        os.fstat(int(text))
    except OSError:  # a variable that was inherited without its pipe
        return None
    return int(text)


def watch_lifeline(on_lost: Callable[[], None] | None = None) -> None:
    """End this process at once when the inherited lifeline is cut, after calling `on_lost`; returns immediately."""
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
    """Start a program in a session of its own that ends when `lifeline_fd`, a `Lifeline`'s, reaches its end of file.

    `stop_signal` asks the program to end, SIGKILL follows after `grace_s` seconds. `user` is (uid, gid) and needs root; `errors`
    goes where `output` goes by default; `pass_lifeline` gives the program the pipe too, for one with children of its own.

    Returns:
        The guard; its exit status is the program's (128 + n when signal n ended it), terminating it stops the program.
    """
    guard = [sys.executable, "-I", "-S", __file__, "--fd", str(lifeline_fd)]
    guard += ["--stop", str(int(stop_signal)), "--grace", str(grace_s)]
    if user is not None:
        guard += ["--user", f"{user[0]}:{user[1]}"]
    if pass_lifeline:
        guard += ["--pass"]
    return subprocess.Popen(
        [*guard, "--", *argv],
        cwd=cwd,
        env=None if env is None else dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        pass_fds=(lifeline_fd,),
        start_new_session=True,
    )


def die_with_parent(stop_signal: int) -> None:
    """On Linux: let the kernel send `stop_signal` to this process when the thread that started it dies."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, stop_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def _become(argv: Sequence[str], user: str, stop_signal: int, guard_pid: int) -> None:
    """In the forked child: drop the uid, ask to die with the guard, become the program. Never returns."""
    try:
        if user:
            uid, gid = (int(part) for part in user.split(":"))
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        die_with_parent(stop_signal)
        if os.getppid() == guard_pid:  # otherwise the guard died before the wish was made
            os.execvp(argv[0], list(argv))  # noqa: S606 - the guard's whole purpose
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error}\n")
        sys.stderr.flush()
    os._exit(127)


def _stand_guard(pid: int, lifeline_fd: int, stop_signal: int, grace_s: float, wake_fd: int, asked: list[int]) -> int:
    """Wait for the program's end; stop it when the lifeline is cut or the guard was signalled. Returns its exit status."""
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
        if (lost or asked) and not stopping:
            os.kill(pid, stop_signal)
            stopping = True
            kill_at = time.monotonic() + grace_s
        if lost:  # nobody is left who could lose patience
            kill_at = min(kill_at, time.monotonic() + DEFAULT_GRACE_S)
        if time.monotonic() >= kill_at:
            os.kill(pid, signal.SIGKILL)
            kill_at = float("inf")


def guard(arguments: Sequence[str]) -> int:
    """The guard's main program; see the module's text."""
    options = {"--fd": "-1", "--stop": "15", "--grace": str(DEFAULT_GRACE_S), "--user": ""}
    rest, pass_on = list(arguments), False
    while rest[0] != "--":
        if rest[0] == "--pass":
            pass_on = True
            del rest[0]
        else:
            options[rest[0]] = rest[1]
            del rest[:2]
    lifeline_fd, stop_signal, grace_s = int(options["--fd"]), int(options["--stop"]), float(options["--grace"])
    os.set_inheritable(lifeline_fd, pass_on)
    guard_pid = os.getpid()
    status = fork_guarded(lifeline_fd, stop_signal, grace_s)
    if status is None:
        _become(rest[1:], options["--user"], stop_signal, guard_pid)
        return 127
    return status


def fork_guarded(lifeline_fd: int, stop_signal: int, grace_s: float) -> int | None:
    """Fork, and stand guard over the child. The caller must have no other thread.

    Returns:
        None in the child, whose signals are as a new program finds them; in the guard, after the child's end, its exit status.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: asked.append(received))
    signal.signal(signal.SIGCHLD, lambda _received, _frame: None)
    pid = os.fork()
    if pid != 0:
        return _stand_guard(pid, lifeline_fd, stop_signal, grace_s, wake_read, asked)
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.close(wake_read)
    os.close(wake_write)
    return None


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:]))
