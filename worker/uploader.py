"""Carries an attempt's events and checkpoints to the platform, for ever if need be. A thread of the supervisor.

The engine's outbox and the supervisor's are two producers; each keeps its order. A checkpoint is registered after the event that
announced it was taken. While the platform is away nobody waits: the files grow, and are sent afterwards. When too much waits
(`worker.outbox_limit`), the engine is told to leave out detail (`oppo_contract.events.DETAIL_KINDS`) and says what it left out;
so does the log's tail. Metrics, checkpoints and outcomes are always kept.

A platform that was restored from a backup asks for what it has forgotten. Where the disk does not have that any more, nothing
that comes after can be told either: shipping ends, and `lost` says why, so that nobody trains on for nothing.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from oppo_contract.events import CheckpointEvent, Event, FinishedEvent, StartedEvent
from oppo_contract.wire import CheckpointRegistration
from worker.artifacts import ArtifactError, FileStore
from worker.checkpoint_pins import Keeper
from worker.folders import AttemptFolder, KeptClaim
from worker.logs import LogTail
from worker.outbox import OutboxReader, OutboxWriter
from worker.outbox_limit import OutboxLimit
from worker.platform_api import GapError, PlatformApi, RefusedError, UnacceptableError, Unreachable
from worker.redaction import Redactor

# Somebody may be watching: what is written is on its way at once. A busy engine's events go four times a second, in batches.
LOOK_EVERY_S, BETWEEN_BATCHES_S = 0.1, 0.25
FOLLOW_EVERY_S = 1.0  # the log files; of each round only so many lines are kept
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
# However long a platform, or a proxy before it, asks us to wait: somebody may be waiting for the devices.
LONGEST_ASKED_S = 120.0
# So often in a row, after the engine's end, with waits between: then what fails for no known reason is given up.
MOST_UNKNOWN = 8
# So long, from then on, a disk may fail without a break, such as a file system of a server that is gone.
LONGEST_DISK_S = 900.0
FREED_AT_ONCE = 16 * 2**20

log = structlog.get_logger("worker.uploader")


class Shipping:
    """Ships what one attempt has on disk. `run` is the thread; the events below tell the supervisor what was seen."""

    def __init__(self, folder: AttemptFolder, claim: KeptClaim, api: PlatformApi, on_started: Callable[[], None]) -> None:
        self.attempt_id = folder.attempt_id
        self.claim = claim
        self.api = api
        self.finished: FinishedEvent | None = None
        self.lost = ""  # what the platform asks for and can be told by nobody, in words
        self.complete = threading.Event()
        self.store = FileStore(claim.claimed.artifact_url)
        self.keeper = Keeper(self.store.root, folder, claim.claimed.resume_from)
        self.notes = OutboxWriter(folder.supervisor_events)
        self.redactor = Redactor(claim.claimed.secrets)
        self._tail = LogTail(folder, self.notes, self.redactor)
        self._engine = OutboxReader(folder.engine_events, "engine", self.redactor)
        self._own = OutboxReader(folder.supervisor_events, "supervisor", self.redactor)
        self._on_started = on_started
        self.limit = OutboxLimit(folder.full_file)
        self._closing = threading.Event()
        self._leaving = threading.Event()
        self._seen_seq = 0
        self._unregistered: list[CheckpointEvent] = []
        self._note_lock = threading.Lock()
        self._spared: tuple[str, ...] = ()
        self._unknown, self._disk_since = 0, math.inf

    def spare_for_others(self, names: Sequence[str]) -> None:
        """Other runs are about to begin with these checkpoints. Told by the heartbeat, which waits for no disk."""
        self._spared = tuple(names)

    def note(self, text: str) -> None:
        """Say something in the run's log."""
        with self._note_lock:
            self.notes.log("supervisor", [text])

    def close(self) -> None:
        """The engine has ended: nothing new will be written."""
        self._closing.set()

    def leave(self) -> None:
        """Stop now; what is not sent stays on disk for a later supervisor."""
        self._leaving.set()
        self._closing.set()

    def run(self) -> None:
        """Look, send, wait; until everything is acknowledged after `close`, or `leave` was called. Then `complete` is set."""
        try:
            self._carry()
        finally:  # or the supervisor would renew the lease for ever, and hold the devices
            self.complete.set()

    def _carry(self) -> None:
        wait_s, follow_at = FIRST_WAIT_S, 0.0
        while not self._leaving.is_set():
            closing, due = self._closing.is_set(), time.monotonic() >= follow_at
            if closing or due:
                follow_at = time.monotonic() + FOLLOW_EVERY_S
            try:
                self._keep_the_disk(follow=closing or due, ended=closing)
                sent = self._ship_all()
            except RefusedError as error:
                log.warning("telemetry_refused", attempt=self.attempt_id, detail=str(error))
                break
            except Exception as error:  # what is not sent, or not written, is so with the next turn
                if closing and self._is_hopeless(error):
                    log.exception("shipping_given_up", attempt=self.attempt_id)
                    self.lost = self.lost or f"remaining events cannot be sent to the platform: {type(error).__name__}: {error}"
                    break
                self._wait_out(error, wait_s, closing)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                continue
            wait_s, self._unknown, self._disk_since = FIRST_WAIT_S, 0, math.inf
            if closing:
                break
            self._closing.wait(BETWEEN_BATCHES_S if sent else LOOK_EVERY_S)

    def _is_hopeless(self, error: Exception) -> bool:
        """Whether this has gone on for too long: the devices are held meanwhile. A platform that is away is waited for."""
        if isinstance(error, Unreachable):
            return False
        if isinstance(error, OSError):
            self._disk_since = min(self._disk_since, time.monotonic())
            return time.monotonic() - self._disk_since > LONGEST_DISK_S
        self._unknown += 1
        return self._unknown >= MOST_UNKNOWN

    def _ship_all(self) -> bool:
        sent = self._ship(self._engine)
        self._register_checkpoints()
        return self._ship(self._own) | sent

    def _keep_the_disk(self, follow: bool, ended: bool) -> None:
        """What is written and deleted besides events. A disk that is full or away is no reason to stop sending."""
        try:
            self.keeper.spare_for_others(self._spared)
            self._mind_the_limit()
            if follow:
                with self._note_lock:
                    self._tail.follow(ended=ended, full=self.limit.full)
        except OSError as error:
            log.warning("disk", attempt=self.attempt_id, detail=str(error))

    def _mind_the_limit(self) -> None:
        """Tell the engine whether the outbox is full. Let go of what was sent: of all of it when the disk is low."""
        if not self._unregistered and self.finished is None:  # or a later supervisor must find them in the file
            self._engine.free(0 if self.limit.disk_low else self.limit.most_bytes / 2, FREED_AT_ONCE)
        said = self.limit.look(self._engine.backlog_bytes() + self._own.backlog_bytes())
        if said:
            self.note(said)
            log.warning("outbox", attempt=self.attempt_id, said=said)

    def _ship(self, outbox: OutboxReader) -> bool:
        """Send all that waits in one outbox; whether anything did. Raises Unreachable or RefusedError."""
        limit, sent = 1000, False
        while lines := outbox.batch(limit):
            self._look_at([line.event for line in lines], outbox)
            sent = True
            try:
                high_water = self.api.send_events(self.attempt_id, outbox.body(lines))
            except GapError as gap:
                self._fill(outbox, gap.expected_seq)
            except UnacceptableError as error:
                if len(lines) == 1:
                    log.warning("event_refused", attempt=self.attempt_id, seq=lines[0].event.seq, detail=str(error))
                    outbox.replace_first(str(error)[:300])
                limit = max(1, len(lines) // 2)
            else:
                taken = outbox.acknowledge(high_water)
                self._unregistered += [event for event in taken if isinstance(event, CheckpointEvent)]
                limit = 1000
        return sent

    def _look_at(self, events: list[Event], outbox: OutboxReader) -> None:
        for event in events:
            if outbox is not self._engine or event.seq <= self._seen_seq:
                continue
            self._seen_seq = event.seq
            if isinstance(event, StartedEvent):
                self._on_started()
            elif isinstance(event, FinishedEvent):
                self.finished = event

    def _fill(self, outbox: OutboxReader, expected_seq: int) -> None:
        try:
            outbox.rewind(expected_seq)
        except LookupError as error:
            self.lost = str(error)
            raise RefusedError(self.lost, "ended") from error

    def _register_checkpoints(self) -> None:
        while self._unregistered:
            event = self._unregistered[0]
            if self.keeper.keep(self._folder_of(event)):
                request = CheckpointRegistration(
                    epoch=self.claim.epoch,
                    step=event.step,
                    url=self._url_of(event),
                    manifest_sha256=event.manifest_sha256,
                    bytes=event.bytes,
                )
                try:
                    self.api.register_checkpoint(self.attempt_id, request)
                    self.keeper.registered()
                except (RefusedError, UnacceptableError) as error:
                    log.warning("checkpoint_refused", attempt=self.attempt_id, step=event.step, detail=str(error))
            self._unregistered.pop(0)

    def _folder_of(self, event: CheckpointEvent) -> Path | None:
        """The checkpoint's folder, which newer ones may have replaced meanwhile; None when it lies outside the run's."""
        try:
            return self.store.folder(self._url_of(event))
        except ArtifactError as error:
            log.warning("checkpoint_outside", attempt=self.attempt_id, detail=str(error))
            return None

    def _url_of(self, event: CheckpointEvent) -> str:
        return f"{self.claim.claimed.artifact_url.rstrip('/')}/{event.folder}"

    def _wait_out(self, error: Exception, wait_s: float, closing: bool) -> None:
        if isinstance(error, Unreachable | OSError):
            what = "platform_away" if isinstance(error, Unreachable) else "disk"
            log.info(what, attempt=self.attempt_id, detail=str(error)[:200])
        else:  # an answer that nobody understands, say
            log.error("shipping_failed", attempt=self.attempt_id, exc_info=error)
        asked = error.retry_after_s if isinstance(error, Unreachable) else None
        wait_s = min(asked, LONGEST_ASKED_S) if asked is not None else wait_s * random.uniform(0.5, 1.0)  # noqa: S311
        # The engine's end is a reason not to wait, also one that came while this turn was under way.
        (self._leaving if closing else self._closing).wait(wait_s)
