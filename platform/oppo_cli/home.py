"""`OPPO_HOME`, the folder with everything an installation on this machine keeps, and who runs in it."""

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
    """Something went wrong that the user can understand; printed as one paragraph, exit status 1."""


class Refusal(click.ClickException):
    """What the user asked for cannot be done as asked; exit status 2."""

    exit_code = REFUSED


@dataclass(frozen=True, slots=True)
class Running:
    """What a running `oppo up` tells other commands of the same home. The file is 0600: it holds passwords."""

    pid: int
    base_url: str
    database_url: str
    redis_url: str

    def environ(self) -> dict[str, str]:
        """The variables that the platform's commands read."""
        return {"DATABASE_URL": self.database_url, "REDIS_URL": self.redis_url, "OPPO_BASE_URL": self.base_url}


class Home:
    """The folder itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.models = path / "models"
        self._running_file = path / "running.json"
        self._lock_file = path / "up.lock"

    @classmethod
    def from_environment(cls) -> Home:
        """`$OPPO_HOME`, or `.oppo` in the working folder; created with mode 0700 when missing."""
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
        """Hold the home for one `oppo up`. Raises Failure when another one runs in it."""
        with self._lock_file.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Failure(self._who_runs()) from None
            try:
                yield
            finally:
                self._running_file.unlink(missing_ok=True)

    def tell(self, running: Running) -> None:
        """Let other commands find what runs."""
        from oppo_contract.machine import write_private  # here: commands that only need the client have no contract

        write_private(self._running_file, json.dumps(asdict(running)))

    def running(self) -> Running | None:
        """The `oppo up` that runs in this home."""
        with self._lock_file.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return self._told()
        return None

    def _told(self) -> Running | None:
        return Running(**json.loads(self._running_file.read_text())) if self._running_file.exists() else None

    def _who_runs(self) -> str:
        told = self._told()
        where = f" at {told.base_url} (process {told.pid})" if told else ""
        return (
            f"OPPO already runs from {self.path}{where}. Stop it with Ctrl-C where it was started, "
            "or set OPPO_HOME to another folder to run a second one."
        )


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a worker, which needs no access to the platform's servers."""
    hidden = ("DATABASE_URL", "REDIS_URL", "OPPO_SECRET_KEY")
    return {key: value for key, value in environ.items() if key not in hidden}
