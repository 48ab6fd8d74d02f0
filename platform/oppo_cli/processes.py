"""Child processes that are kept alive: started, restarted with growing patience, stopped in the opposite order."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from oppo_cli.home import Failure

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
STEADY_AFTER_S = 60.0
LOG_LINES_SHOWN = 15
LOG_BYTES_KEPT = 10 * 1024 * 1024


@dataclass(slots=True)
class Child:
    """One process and how to start it again."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    log: Path
    stop_within_s: float = 10.0
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    wait_s: float = FIRST_WAIT_S
    start_at: float = 0.0

    def begin(self) -> None:
        """Start it now."""
        self.process = self.start()
        self.started_at = time.monotonic()

    def look(self, now: float) -> float:
        """Restart it when it died and its time has come; returns when to look again (infinity: when it dies)."""
        if self.process is not None and self.process.poll() is None:
            return float("inf")
        if self.process is not None:
            steady = now - self.started_at > STEADY_AFTER_S
            self.wait_s = FIRST_WAIT_S if steady else min(2 * self.wait_s, LONGEST_WAIT_S)
            sys.stderr.write(f"{self.name} ended with status {self.process.returncode}; restarting it ({self.log})\n")
            self.process = None
            self.start_at = now + self.wait_s
        if now < self.start_at:
            return self.start_at
        self.begin()
        return float("inf")

    def end(self) -> None:
        """Stop it and wait for its end."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(self.stop_within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def wait_until(self, ready: Callable[[], bool], within_s: float) -> None:
        """Block until `ready`. Raises Failure when the process ends or takes too long, with the end of its log."""
        deadline = time.monotonic() + within_s
        while not ready():
            assert self.process is not None
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with status {self.process.returncode} while starting.\n{last_lines(self.log)}")
            if time.monotonic() > deadline:
                raise Failure(f"{self.name} was not ready within {within_s:.0f} s.\n{last_lines(self.log)}")
            time.sleep(0.1)


class Watch:
    """Waits for signals without polling: a child's end, Ctrl-C, a request to stop."""

    def __init__(self) -> None:
        self.stop_asked = False
        self._fd, write_fd = os.pipe()
        os.set_blocking(self._fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def catch_stop(self) -> None:
        """From now on SIGINT, SIGTERM and SIGHUP set `stop_asked` instead of interrupting."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def wait(self, seconds: float) -> None:
        """Return after `seconds`, or as soon as a signal has arrived."""
        select.select([self._fd], [], [], None if seconds == float("inf") else max(0.0, seconds))
        try:
            os.read(self._fd, 4096)
        except BlockingIOError:
            return

    def _stop(self, _number: int, _frame: object) -> None:
        self.stop_asked = True


def oppo_command(*arguments: str) -> list[str]:
    """The command line of another `oppo` of this installation."""
    return [sys.executable, "-m", "oppo_cli", *arguments]


def start_logged(argv: list[str], environ: Mapping[str, str], lifeline_fd: int, log: Path) -> subprocess.Popen[bytes]:
    """Start one of our own programs in a session of its own, with the lifeline, its output in a file."""
    if log.exists() and log.stat().st_size > LOG_BYTES_KEPT:
        log.replace(log.with_suffix(".1.log"))
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            pass_fds=(lifeline_fd,), start_new_session=True,
        )  # fmt: skip


def last_lines(log: Path) -> str:
    """The end of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]) if log.exists() else ""
