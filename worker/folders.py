"""The worker's files: who the node is, and one folder an attempt, with its lock.

OPPO_HOME/worker/node.json            the node's identity, 0600: it holds its token and the broker's password
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

LOCK_WITHIN_S = 1.0
LOOK_AGAIN_S = 0.05

log = structlog.get_logger("worker.folders")


class Record(BaseModel):
    """A small file of ours."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NodeIdentity(Record):
    """What a node keeps from joining."""

    platform_url: str
    name: str
    node_id: int
    node_token: str
    queue: str
    broker_url: str
    artifact_root: str = ""
    models_roots: list[Path] = []


class KeptClaim(Record):
    """What a supervisor got from its claim; enough to report the attempt even after the supervisor was killed."""

    epoch: int
    claimed: Claimed


class EngineEnd(Record):
    """How the engine's process ended, and which signal it had been sent for the platform, if any."""

    exit_code: int
    signal: str | None = None
    reason: str | None = None


class AttemptFolder:
    """Files of one attempt. They stay until its outcome is acknowledged."""

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
        """What the engine wrote to `stdout` or `stderr`."""
        return self.path / f"{stream}.log"

    @contextmanager
    def locked(self, epoch: int) -> Iterator[bool]:
        """Hold the attempt's lock; yields False when another supervisor has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.lock_file.open("a+") as lock:
            held = _lock_within(lock.fileno(), LOCK_WITHIN_S)
            if held:
                lock.truncate(0)
                lock.write(f"{os.getpid()} {epoch}")
                lock.flush()
            yield held

    def supervised(self) -> RunningAttempt | None:
        """The attempt when a supervisor lives, else None."""
        try:
            with self.lock_file.open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    words = lock.read().split()
                    return RunningAttempt(attempt_id=self.attempt_id, epoch=int(words[1])) if len(words) == 2 else None
        except FileNotFoundError:
            return None
        return None

    def supervisor_pid(self) -> int | None:
        """Process id of the living supervisor."""
        if self.supervised() is None:
            return None
        words = self.lock_file.read_text().split()
        return int(words[0]) if words else None

    def kept_claim(self) -> KeptClaim | None:
        """The claim that an earlier supervisor left; one that says nothing any more is moved aside, and is told of once."""
        try:
            return KeptClaim.model_validate_json(self.claim_file.read_bytes())
        except FileNotFoundError:  # its supervisor may remove the folder at any moment
            return None
        except ValueError as error:
            self._put_claim_aside(str(error))
            return None

    def _put_claim_aside(self, why: str) -> None:
        """Without its token nobody can ship what lies here: the platform gives the attempt up when its lease ends."""
        aside = self.claim_file.with_name(self.claim_file.name + ".unreadable")
        with contextlib.suppress(FileNotFoundError):
            self.claim_file.replace(aside)
        log.error("claim_unreadable", attempt=self.attempt_id, moved_to=str(aside), detail=why[:200])

    def left_behind(self) -> RunningAttempt | None:
        """The attempt when a supervisor claimed it and could not report its outcome; it has points and checkpoints to ship."""
        claim = self.kept_claim()
        return None if claim is None else RunningAttempt(attempt_id=self.attempt_id, epoch=claim.epoch)

    def engine_end(self) -> EngineEnd | None:
        """How the engine ended, when a supervisor lived to see it and its file says so."""
        try:
            return EngineEnd.model_validate_json(self.end_file.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.warning("end_unreadable", attempt=self.attempt_id, detail=str(error)[:200])
            return None

    def session(self) -> int | None:
        """The engine's session, as far as the file that was written at its start tells."""
        try:
            return int(self.session_file.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def stuck(self) -> str:
        """What is left of the engine and does not end; empty when nothing is."""
        try:
            return self.stuck_file.read_text()
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """Forget the attempt: everything is acknowledged, or it was never ours."""
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
        """Who the node is, or None before it joined."""
        return NodeIdentity.model_validate_json(self.node_file.read_bytes()) if self.node_file.exists() else None

    def keep_identity(self, identity: NodeIdentity) -> None:
        """Remember who the node is."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(self.node_file, identity.model_dump_json(indent=1))

    def attempt(self, attempt_id: int) -> AttemptFolder:
        """The folder of an attempt, which need not exist yet."""
        return AttemptFolder(self.attempts_folder / str(attempt_id))

    def attempts(self) -> list[AttemptFolder]:
        """Every attempt that has files here."""
        if not self.attempts_folder.exists():
            return []
        return [AttemptFolder(path) for path in sorted(self.attempts_folder.iterdir()) if path.name.isdigit()]


def _lock_within(descriptor: int, within_s: float) -> bool:
    # The agent looks at locks with a shared one of its own for an instant; a supervisor must not mistake that for a rival.
    deadline = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_AGAIN_S)
        else:
            return True
