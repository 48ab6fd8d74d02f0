"""What PostgreSQL and Valkey have in common as embedded servers: start, wait until it answers, stop, clean up."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, ClassVar

from oppo_contract.lifeline import start_guarded
from oppo_platform.embedded.ports import remembered_port
from oppo_platform.embedded.server_dirs import Quarters

READY_WITHIN_S = 120.0
LOOK_AGAIN_S = 0.05
LOG_LINES_SHOWN = 12


class ServerError(RuntimeError):
    """An embedded server could not be started; the text is for the user."""


class EmbeddedServer(ABC):
    """One server of one home. Not thread-safe; `start` may be called again after the server died."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    grace_s: ClassVar[float] = 20.0

    def __init__(self, home: Path, *, throwaway: bool = False) -> None:
        try:
            self.quarters = Quarters.for_home(home)
        except OSError as error:
            raise ServerError(
                f"cannot prepare a folder for {self.name}: {error}. Set DATABASE_URL and REDIS_URL to use servers of yours."
            ) from error
        self.throwaway = throwaway
        self.log = self.quarters.home / "logs" / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._port: int | None = None

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1; chosen once, then the same for as long as this object lives."""
        if self._port is None:
            self._port = remembered_port(self.quarters.home, self.name)
        return self._port

    @property
    def data(self) -> Path:
        """The folder that the server itself writes to."""
        return self.quarters.data / self.name

    @property
    def password(self) -> str:
        """The password that every client needs."""
        return self.quarters.password(self.name)

    @property
    @abstractmethod
    def url(self) -> str:
        """How clients reach it, password included."""

    @abstractmethod
    def prepare(self) -> list[str]:
        """Write what the server needs before it starts; returns its command line."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether a client gets an answer now."""

    def start(self, lifeline_fd: int) -> subprocess.Popen[bytes]:
        """Start the server below a guard; returns without waiting until it is ready.

        Raises:
            ServerError: another process runs on the same folder, or a first-time set-up failed.
        """
        self._take_lock()
        argv = self.prepare()
        with self.log.open("ab") as log:
            self.process = start_guarded(
                argv,
                lifeline_fd,
                stop_signal=self.stop_signal,
                grace_s=self.grace_s,
                user=self.quarters.user,
                cwd=self.data,
                output=log,
            )
        return self.process

    def wait_until_ready(self, within_s: float = READY_WITHIN_S) -> None:
        """Block until a client gets an answer.

        Raises:
            ServerError: it ended, or did not answer in time; the text holds the last lines of its log.
        """
        if self.process is None:
            raise RuntimeError("start() comes first")
        deadline = time.monotonic() + within_s
        while not self.answers():
            if self.process.poll() is not None:
                raise ServerError(
                    f"{self.name} ended with status {self.process.returncode} while starting.\n{self.last_log_lines()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} did not answer within {within_s:.0f} s.\n{self.last_log_lines()}")
            time.sleep(LOOK_AGAIN_S)

    def stop(self) -> None:
        """Stop the server and wait for its end. Harmless when it does not run."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_data(self) -> None:
        """Delete all that the server has stored. It must be stopped."""
        shutil.rmtree(self.data, ignore_errors=True)
        if self.quarters.user is not None and not any(self.quarters.data.iterdir()):
            self.quarters.data.rmdir()

    def last_log_lines(self) -> str:
        """The end of the server's log, for an error message."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = (self.quarters.home / f"{self.name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ServerError(f"{self.name} of {self.quarters.home} is already run by another process.") from None
        self._lock = lock
