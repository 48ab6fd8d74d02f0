"""`OPPO_HOME`, the folder of an installation on this machine: its lock, and the running `oppo up`."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from oppo_cli.main import REFUSED


class Failure(click.ClickException):
    """An error with a message for the user; exit status 1."""


class Refusal(click.ClickException):
    """An invalid request; exit status 2."""

    exit_code = REFUSED


@dataclass(frozen=True, slots=True)
class RunningPlatform:
    """A running `oppo up`, for other commands with the same home. Stored with mode 0600: URLs contain passwords."""

    pid: int
    base_url: str
    database_url: str
    redis_url: str

    def environ(self) -> dict[str, str]:
        """Environment variables of the platform's commands."""
        return {"DATABASE_URL": self.database_url, "REDIS_URL": self.redis_url, "OPPO_BASE_URL": self.base_url}


class Home:
    """The folder `OPPO_HOME`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.models = path / "models"
        self._running_file = path / "running.json"
        self._lock_file = path / "up.lock"

    @classmethod
    def from_environment(cls) -> Home:
        """`$OPPO_HOME`, or `.oppo` in the working folder; created with mode 0700 if missing."""
        path = Path(os.environ.get("OPPO_HOME", "").strip() or ".oppo").expanduser().resolve()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            home = cls(path)
            home.logs.mkdir(exist_ok=True)
            home.models.mkdir(exist_ok=True)
        except OSError as error:
            raise Failure(f"The folder {path} cannot be used: {error.strerror}. Set OPPO_HOME to another one.") from error
        return home

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the home for one `oppo up`. Raises Failure if another one holds the lock."""
        with self._lock_file.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Failure(self._locked_message()) from None
            try:
                yield
            finally:
                self._running_file.unlink(missing_ok=True)

    def save_running(self, running: RunningPlatform) -> None:
        """Publish this `oppo up` to other commands."""
        from oppo_contract.machine import write_private  # lazy: the `client` extra lacks its dependencies

        write_private(self._running_file, json.dumps(asdict(running)))

    def running(self) -> RunningPlatform | None:
        """The running `oppo up` of this home."""
        with self._lock_file.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return self._read_running()
        return None

    def _read_running(self) -> RunningPlatform | None:
        return RunningPlatform(**json.loads(self._running_file.read_text())) if self._running_file.exists() else None

    def _locked_message(self) -> str:
        running = self._read_running()
        where = f" at {running.base_url} (process {running.pid})" if running else ""
        return (
            f"OPPO already runs from {self.path}{where}. Stop it with Ctrl-C where it was started, "
            "or set OPPO_HOME to another folder to run a second one."
        )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: without the platform's servers and secret key."""
    secrets = ("DATABASE_URL", "REDIS_URL", "OPPO_SECRET_KEY")
    return {key: value for key, value in environ.items() if key not in secrets}
