"""The worker's files: the node's identity, and a folder with a lock for each attempt.

OPPO_HOME/worker/node.json            identity of the node with its token and the broker's password, 0600
OPPO_HOME/worker/attempts/17/         lock, claim.json (0600), spec.json, engine.jsonl, supervisor.jsonl, stdout.log, …
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict

from oppo_contract.events import FULL_SUFFIX
from oppo_contract.machine import write_private
from oppo_contract.wire import Claimed, RunningAttempt

LOCK_TIMEOUT_S = 1.0
POLL_S = 0.05

log = structlog.get_logger("worker.folders")


class Record(BaseModel):
    """Base of the worker's JSON files."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeIdentity(Record):
    """The node's identity and the platform's addresses, saved at join."""

    platform_url: str
    name: str
    node_id: int
    node_token: str
    queue: str
    broker_url: str
    artifact_root: str = ""
    models_roots: list[Path] = []


class SavedClaim(Record):
    """A supervisor's claim; enough to report the attempt after the supervisor was killed."""

    epoch: int
    claimed: Claimed


class EngineEnd(Record):
    """How the engine's process ended, and the platform's signal that stopped it, if any.

    node_failed: the node, not the engine, is at fault.
    """

    exit_code: int
    signal: str | None = None
    reason: str | None = None
    node_failed: bool = False


class AttemptFolder:
    """Files of one attempt, deleted when its outcome is acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt_id = int(path.name)
        self.lock_file = path / "lock"
        self.claim_file = path / "claim.json"
        self.spec_file = path / "spec.json"
        self.end_file = path / "end.json"
        self.session_file = path / "session"
        self.registered_file = path / "registered"
        self.stuck_file = path / "stuck"
        self.engine_events = path / "engine.jsonl"
        self.supervisor_events = path / "supervisor.jsonl"
        self.full_file = self.engine_events.with_name(self.engine_events.name + FULL_SUFFIX)

    def log_file(self, stream: str) -> Path:
        """The engine's `stdout` or `stderr`."""
        return self.path / f"{stream}.log"

    @contextmanager
    def locked(self, epoch: int) -> Iterator[bool]:
        """Hold the attempt's lock; yields False if another supervisor holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.lock_file.open("a+") as lock:
            acquired = _try_lock(lock.fileno()) and _is_at(lock.fileno(), self.lock_file)
            if acquired:
                lock.truncate(0)
                lock.write(f"{os.getpid()} {epoch}")
                lock.flush()
            yield acquired

    def _supervisor(self) -> tuple[int, int] | None:
        """(process id, epoch) of the running supervisor, which may delete the folder at any time."""
        try:
            with self.lock_file.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    words = lock.read().split()
                    return (int(words[0]), int(words[1])) if len(words) == 2 else None
        except FileNotFoundError:
            return None
        return None

    def running_attempt(self) -> RunningAttempt | None:
        """The attempt if its supervisor runs, else None."""
        supervisor = self._supervisor()
        return None if supervisor is None else RunningAttempt(attempt_id=self.attempt_id, epoch=supervisor[1])

    def supervisor_pid(self) -> int | None:
        """Process id of the running supervisor."""
        supervisor = self._supervisor()
        return None if supervisor is None else supervisor[0]

    def saved_claim(self) -> SavedClaim | None:
        """The claim of an earlier supervisor; an unreadable one is moved aside and logged."""
        try:
            return SavedClaim.model_validate_json(self.claim_file.read_bytes())
        except FileNotFoundError:  # its supervisor may delete the folder at any time
            return None
        except ValueError as error:
            # Without its token nothing can be uploaded: the platform ends the attempt when its lease expires.
            aside = self.claim_file.with_name(self.claim_file.name + ".unreadable")
            with contextlib.suppress(FileNotFoundError):
                self.claim_file.replace(aside)
            log.error("claim_unreadable", attempt=self.attempt_id, moved_to=str(aside), detail=str(error)[:200])
            return None

    def unreported_attempt(self) -> RunningAttempt | None:
        """The attempt if it was claimed and its outcome is not reported; events and checkpoints may be left to upload."""
        claim = self.saved_claim()
        return None if claim is None else RunningAttempt(attempt_id=self.attempt_id, epoch=claim.epoch)

    def engine_end(self) -> EngineEnd | None:
        """How the engine ended; None if its supervisor was killed before, or the file is unreadable."""
        try:
            return EngineEnd.model_validate_json(self.end_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning("end_unreadable", attempt=self.attempt_id, detail=str(error)[:200])
            return None

    def session(self) -> int | None:
        """The engine's session id; None if it was not started, or the file is unreadable."""
        try:
            return int(self.session_file.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def stuck(self) -> str:
        """Message about processes of the engine that cannot be killed; empty if there are none."""
        with contextlib.suppress(FileNotFoundError):
            return self.stuck_file.read_text()
        return ""

    def remove_unclaimed(self) -> None:
        """Delete the folder if its supervisor ended before it saved a claim: only its lock and unfinished files."""
        with contextlib.suppress(FileNotFoundError):
            if all(path == self.lock_file or path.name.startswith(".") for path in self.path.iterdir()):
                with self.lock_file.open("a") as lock:
                    if _try_lock(lock.fileno(), 0):
                        self.remove()

    def remove(self) -> None:
        """Delete the folder."""
        if self.path.exists():
            shutil.rmtree(self.path)


class WorkerFolder:
    """The worker's part of `OPPO_HOME`."""

    def __init__(self, home: Path) -> None:
        self.path = (home / "worker").resolve()
        self.node_file = self.path / "node.json"
        self.attempts_folder = self.path / "attempts"

    @classmethod
    def from_environment(cls) -> WorkerFolder:
        """The folder below `OPPO_HOME` (default `.oppo`)."""
        return cls(Path(os.environ.get("OPPO_HOME", "").strip() or ".oppo").expanduser())

    def identity(self) -> NodeIdentity | None:
        """The node's identity; None before it joined."""
        return NodeIdentity.model_validate_json(self.node_file.read_bytes()) if self.node_file.exists() else None

    def save_identity(self, identity: NodeIdentity) -> None:
        """Save the node's identity."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.node_file, identity.model_dump_json(indent=1))

    def attempt(self, attempt_id: int) -> AttemptFolder:
        """The folder of an attempt, which need not exist yet."""
        return AttemptFolder(self.attempts_folder / str(attempt_id))

    def attempts(self) -> list[AttemptFolder]:
        """Every attempt with files on this node."""
        if not self.attempts_folder.exists():
            return []
        return [AttemptFolder(path) for path in sorted(self.attempts_folder.iterdir()) if path.name.isdigit()]


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`: its folder may have been deleted meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int, timeout_s: float = LOCK_TIMEOUT_S) -> bool:
    # The agent briefly takes a shared lock to check for a supervisor, hence the timeout.
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        else:
            return True
