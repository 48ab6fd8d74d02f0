"""Base class of embedded servers: start, wait until ready, stop, clean up."""

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
from oppo_platform.embedded.ports import saved_port
from oppo_platform.embedded.server_dirs import ServerDirs

READY_TIMEOUT_S = 120.0
POLL_S = 0.05
LOG_LINES_SHOWN = 12


class ServerError(RuntimeError):
    """An embedded server could not be started; the text is for the user."""


class EmbeddedServer(ABC):
    """One server of one home. Not thread-safe; `start` may be called again after the server has died."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    grace_s: ClassVar[float] = 20.0

    def __init__(self, home: Path, *, throwaway: bool = False) -> None:
        try:
            self.dirs = ServerDirs.create(home)
        except OSError as error:
            raise ServerError(
                f"cannot prepare a folder for {self.name}: {error}. Set DATABASE_URL and REDIS_URL to use servers of yours."
            ) from error
        self.throwaway = throwaway
        self.log = self.dirs.home / "logs" / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None
        self._port: int | None = None

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1, constant for the life of this object."""
        if self._port is None:
            self._port = saved_port(self.dirs.home, self.name)
        return self._port

    @property
    def data(self) -> Path:
        """The server's data folder."""
        return self.dirs.data / self.name

    @property
    def password(self) -> str:
        """The password of every client."""
        return self.dirs.password(self.name)

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for clients, with password."""

    def claim(self) -> None:
        """Take the folder's lock, so that `port` and `url` stay as they are from here on. `start` does it too.

        Raises:
            ServerError: another process uses the same folder.
        """
        if self._lock is not None:
            return
        lock = (self.dirs.home / f"{self.name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ServerError(f"{self.name} of {self.dirs.home} is already run by another process.") from None
        self._lock = lock

    @abstractmethod
    def prepare(self) -> list[str]:
        """Prepare files before the start; returns the command line."""

    @abstractmethod
    def responds(self) -> bool:
        """Whether the server responds to clients."""

    def start(self, lifeline_fd: int) -> subprocess.Popen[bytes]:
        """Start the server in a guarded process, without waiting until it is ready.

        Raises:
            ServerError: another process uses the same folder, or the first setup failed.
        """
        self.claim()
        argv = self.prepare()
        with self.log.open("ab") as log:
            self.process = start_guarded(
                argv,
                lifeline_fd,
                stop_signal=self.stop_signal,
                grace_s=self.grace_s,
                user=self.dirs.user,
                cwd=self.data,
                output=log,
            )
        return self.process

    def wait_until_ready(self, within_s: float = READY_TIMEOUT_S) -> None:
        """Block until the server responds to clients.

        Raises:
            ServerError: it ended, or did not respond in time; the text has the last lines of its log.
        """
        if self.process is None:
            raise RuntimeError("start() comes first")
        deadline = time.monotonic() + within_s
        while not self.responds():
            if self.process.poll() is not None:
                raise ServerError(
                    f"{self.name} ended with status {self.process.returncode} while starting.\n{self.last_log_lines()}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} did not answer within {within_s:.0f} s.\n{self.last_log_lines()}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the server, if it runs, and wait for its end."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_data(self) -> None:
        """Delete the data of the stopped server."""
        shutil.rmtree(self.data, ignore_errors=True)
        if self.dirs.user is not None and self.dirs.data.is_dir() and not any(self.dirs.data.iterdir()):
            self.dirs.data.rmdir()

    def last_log_lines(self) -> str:
        """The end of the server's log, for an error message."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:])
