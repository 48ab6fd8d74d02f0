"""Supervised child processes: start, restart with exponential back-off, stop."""

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

MIN_BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
BACKOFF_RESET_S = 60.0
LAST_LINES = 15
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_LOG_BYTES = 10 * 1024 * 1024


@dataclass(slots=True)
class Child:
    """A process that is restarted when it ends."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    log: Path
    stop_timeout_s: float = 10.0
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    backoff_s: float = MIN_BACKOFF_S
    restart_at: float = 0.0

    def launch(self) -> None:
        """Start the process. Raises Failure if it cannot be started."""
        try:
            self.process = self.start()
        except OSError as error:
            raise Failure(f"{self.name} could not be started: {error}") from error
        self.started_at = time.monotonic()

    def check(self, now: float) -> float:
        """Restart the process if it ended and its back-off is over. Returns the time of the next check (infinity: at its end)."""
        if self.process is not None and self.process.poll() is None:
            return float("inf")
        if self.process is not None:
            sys.stderr.write(f"{self.name} ended with status {self.process.returncode}; restarting it ({self.log})\n")
            self.process = None
            self._back_off(now)
        if now < self.restart_at:
            return self.restart_at
        try:
            self.launch()
        except Failure as failure:  # such as a full disk
            sys.stderr.write(f"{failure.message}; trying again\n")
            self._back_off(now)
            return self.restart_at
        return float("inf")

    def _back_off(self, now: float) -> None:
        stable = now - self.started_at > BACKOFF_RESET_S
        self.backoff_s = MIN_BACKOFF_S if stable else min(2 * self.backoff_s, MAX_BACKOFF_S)
        self.restart_at = now + self.backoff_s

    def stop(self) -> None:
        """Terminate the process and wait for its end; kill it after `stop_timeout_s`."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(self.stop_timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Block until `ready`. Raises Failure with the last log lines if the process ends or `timeout_s` passes."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            assert self.process is not None
            if self.process.poll() is not None:
                raise Failure(f"{self.name} ended with status {self.process.returncode} while starting.\n{last_lines(self.log)}")
            if time.monotonic() > deadline:
                raise Failure(f"{self.name} was not ready within {timeout_s:.0f} s.\n{last_lines(self.log)}")
            time.sleep(0.1)


class StopRequested(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP during the start."""


class SignalWaiter:
    """Waits for signals without polling: SIGCHLD, Ctrl-C, SIGTERM."""

    def __init__(self) -> None:
        self.stop_requested = False
        self._fd, write_fd = os.pipe()
        os.set_blocking(self._fd, False)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def raise_on_stop(self) -> None:
        """Let the first SIGINT, SIGTERM or SIGHUP raise `StopRequested` wherever the main thread is; later ones do nothing."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._raise)

    def catch_stop(self) -> None:
        """Let SIGINT, SIGTERM and SIGHUP set `stop_requested` instead of interrupting."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def wait(self, seconds: float) -> None:
        """Block for `seconds` or until a signal arrives."""
        select.select([self._fd], [], [], None if seconds == float("inf") else max(0.0, seconds))
        try:
            os.read(self._fd, 4096)
        except BlockingIOError:
            return

    def _stop(self, _number: int, _frame: object) -> None:
        self.stop_requested = True

    def _raise(self, number: int, _frame: object) -> None:
        self.catch_stop()
        self.stop_requested = True
        raise StopRequested(signal.Signals(number).name)


def oppo_command(*arguments: str) -> list[str]:
    """Command line of `oppo` of this installation."""
    return [sys.executable, "-m", "oppo_cli", *arguments]


def start_logged(argv: list[str], environ: Mapping[str, str], lifeline_fd: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a program in its own session, with the lifeline, and its output in a rotated log."""
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".1.log"))
    with log.open("ab") as output:
        return subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            pass_fds=(lifeline_fd,), start_new_session=True,
        )  # fmt: skip


def last_lines(log: Path) -> str:
    """The last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:]) if log.exists() else ""
