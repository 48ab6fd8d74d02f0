"""Uploads an attempt's events and registers its checkpoints; a thread of the supervisor that retries without a time limit.

The outboxes of engine and supervisor are each sent in order. A checkpoint is registered after its event is acknowledged. While
the platform is unreachable the files grow. When an outbox is full (`worker.outbox_limit`), the engine and the log tail drop
detail events (`oppo_contract.events.DETAIL_KINDS`) and report the number; metrics, checkpoints and outcomes are never dropped.

A platform restored from a backup requests events again. If they are no longer on disk, later events cannot be delivered either:
the upload ends, and `lost` has the reason, so that the supervisor ends the attempt.
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
from oppo_contract.wire import MAX_BATCH_EVENTS, CheckpointRegistration
from worker.artifacts import ArtifactError, FileStore
from worker.checkpoint_pins import CheckpointPins
from worker.folders import AttemptFolder, SavedClaim
from worker.logs import LogTail
from worker.outbox import OutboxReader, OutboxWriter
from worker.outbox_limit import OutboxLimit
from worker.platform_api import GapError, PlatformApi, RefusedError, UnacceptableError, Unreachable
from worker.redaction import Redactor

POLL_S, BATCH_INTERVAL_S = 0.1, 0.25
LOG_INTERVAL_S = 1.0  # log files are tailed with a limit on lines per round
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0  # backoff
MAX_RETRY_AFTER_S = 120.0  # upper bound for Retry-After: meanwhile the attempt holds devices
# After the engine's end, give up after so many consecutive unexpected errors, or after a disk has failed for so long.
MAX_UNKNOWN_ERRORS = 8
MAX_DISK_OUTAGE_S = 900.0
MIN_FREED_BYTES = 16 * 2**20

log = structlog.get_logger("worker.uploader")


class Uploader:
    """Uploads one attempt's outboxes. `run` is the thread's function; other methods are called by the supervisor."""

    def __init__(self, folder: AttemptFolder, claim: SavedClaim, api: PlatformApi, on_started: Callable[[], None]) -> None:
        self.attempt_id = folder.attempt_id
        self.claim = claim
        self.api = api
        self.finished: FinishedEvent | None = None
        self.lost = ""  # why events cannot be delivered any more
        self.complete = threading.Event()
        self.store = FileStore(claim.claimed.artifact_url)
        self.pins = CheckpointPins(self.store.root, folder, claim.claimed.resume_from)
        self._log_outbox = OutboxWriter(folder.supervisor_events)
        self.redactor = Redactor(claim.claimed.secrets)
        self._tail = LogTail(folder, self._log_outbox, self.redactor)
        self._engine = OutboxReader(folder.engine_events, "engine", self.redactor)
        self._supervisor = OutboxReader(folder.supervisor_events, "supervisor", self.redactor)
        self._on_started = on_started
        self.limit = OutboxLimit(folder.full_file)
        self._closing = threading.Event()
        self._stop = threading.Event()
        self._seen_seq = 0
        self._unregistered: list[CheckpointEvent] = []
        self._log_lock = threading.Lock()
        self._other_pins: tuple[str, ...] = ()
        self._unknown_errors, self._disk_since = 0, math.inf

    def pin_for_others(self, names: Sequence[str]) -> None:
        """Pin these checkpoints, which other runs are about to start from; done later by the thread."""
        self._other_pins = tuple(names)

    def log(self, text: str) -> None:
        """Write a line to the run's log."""
        with self._log_lock:
            self._log_outbox.log("supervisor", [text])

    def close(self) -> None:
        """The engine has ended: finish when everything is sent."""
        self._closing.set()

    def stop(self) -> None:
        """Stop now; unsent events stay on disk for the next supervisor."""
        self._stop.set()
        self._closing.set()

    def run(self) -> None:
        """Upload until everything is acknowledged after `close`, or until `stop`. Then set `complete`."""
        try:
            self._upload_loop()
        finally:  # otherwise the supervisor would renew the lease forever
            self.complete.set()

    def _upload_loop(self) -> None:
        wait_s, follow_at = FIRST_WAIT_S, 0.0
        while not self._stop.is_set():
            closing, due = self._closing.is_set(), time.monotonic() >= follow_at
            if closing or due:
                follow_at = time.monotonic() + LOG_INTERVAL_S
            try:
                self._update_disk(follow=closing or due, ended=closing)
                sent = self._send_all()
            except RefusedError as error:
                log.warning("telemetry_refused", attempt=self.attempt_id, detail=str(error))
                break
            except Exception as error:  # retried in the next iteration
                if closing and self._should_give_up(error):
                    log.exception("shipping_given_up", attempt=self.attempt_id)
                    self.lost = self.lost or f"remaining events cannot be sent to the platform: {type(error).__name__}: {error}"
                    break
                self._back_off(error, wait_s, closing)
                wait_s = min(2 * wait_s, MAX_WAIT_S)
                continue
            wait_s, self._unknown_errors, self._disk_since = FIRST_WAIT_S, 0, math.inf
            if closing:
                break
            self._closing.wait(BATCH_INTERVAL_S if sent else POLL_S)

    def _should_give_up(self, error: Exception) -> bool:
        """Whether errors have lasted too long, while the attempt holds devices. Never while the platform is unreachable."""
        if isinstance(error, Unreachable):
            return False
        if isinstance(error, OSError):
            self._disk_since = min(self._disk_since, time.monotonic())
            return time.monotonic() - self._disk_since > MAX_DISK_OUTAGE_S
        self._unknown_errors += 1
        return self._unknown_errors >= MAX_UNKNOWN_ERRORS

    def _send_all(self) -> bool:
        sent = self._send(self._engine)
        self._register_checkpoints()
        return self._send(self._supervisor) | sent

    def _update_disk(self, follow: bool, ended: bool) -> None:
        """Update pins, limit and log tail. A disk error does not stop the upload."""
        try:
            self.pins.pin_for_others(self._other_pins)
            self._update_limit()
            if follow:
                with self._log_lock:
                    self._tail.follow(ended=ended, full=self.limit.full)
        except OSError as error:
            log.warning("disk", attempt=self.attempt_id, detail=str(error))

    def _update_limit(self) -> None:
        """Signal a full outbox to the engine. Free the space of sent events; of all of them when the disk is low."""
        if not self._unregistered and self.finished is None:  # otherwise a later supervisor needs them
            self._engine.free(0 if self.limit.disk_low else self.limit.max_bytes / 2, MIN_FREED_BYTES)
        message = self.limit.update(self._engine.backlog_bytes() + self._supervisor.backlog_bytes())
        if message:
            self.log(message)
            log.warning("outbox", attempt=self.attempt_id, said=message)

    def _send(self, outbox: OutboxReader) -> bool:
        """Send all events of one outbox. Returns whether there were any. Raises Unreachable or RefusedError."""
        limit, sent = MAX_BATCH_EVENTS, False
        while records := outbox.batch(limit):
            self._track([record.event for record in records], outbox)
            sent = True
            try:
                high_water = self.api.send_events(self.attempt_id, outbox.body(records))
            except GapError as gap:
                self._rewind(outbox, gap.expected_seq)
            except UnacceptableError as error:
                if len(records) == 1:
                    log.warning("event_refused", attempt=self.attempt_id, seq=records[0].event.seq, detail=str(error))
                    outbox.replace_first(str(error)[:300])
                limit = max(1, len(records) // 2)
            else:
                acknowledged = outbox.acknowledge(high_water)
                self._unregistered += [event for event in acknowledged if isinstance(event, CheckpointEvent)]
                limit = MAX_BATCH_EVENTS
        return sent

    def _track(self, events: list[Event], outbox: OutboxReader) -> None:
        for event in events:
            if outbox is not self._engine or event.seq <= self._seen_seq:
                continue
            self._seen_seq = event.seq
            if isinstance(event, StartedEvent):
                self._on_started()
            elif isinstance(event, FinishedEvent):
                self.finished = event

    def _rewind(self, outbox: OutboxReader, expected_seq: int) -> None:
        try:
            outbox.rewind(expected_seq)
        except LookupError as error:
            self.lost = str(error)
            raise RefusedError(self.lost, "ended") from error

    def _register_checkpoints(self) -> None:
        while self._unregistered:
            event = self._unregistered[0]
            if self._pin(self._checkpoint_folder(event)):
                request = CheckpointRegistration(
                    epoch=self.claim.epoch,
                    step=event.step,
                    url=self._checkpoint_url(event),
                    manifest_sha256=event.manifest_sha256,
                    bytes=event.bytes,
                )
                try:
                    self.api.register_checkpoint(self.attempt_id, request)
                    self.pins.confirm()
                except (RefusedError, UnacceptableError) as error:
                    log.warning("checkpoint_refused", attempt=self.attempt_id, step=event.step, detail=str(error))
            self._unregistered.pop(0)

    def _pin(self, folder: Path | None) -> bool:
        """Pin a checkpoint; False if it is deleted. After the engine's end nothing deletes it: a full disk does not matter."""
        try:
            return self.pins.pin(folder)
        except OSError as error:
            if not self._closing.is_set():
                raise
            log.warning("disk", attempt=self.attempt_id, detail=str(error))
            return folder is not None and folder.is_dir()

    def _checkpoint_folder(self, event: CheckpointEvent) -> Path | None:
        """The checkpoint's folder, which may be deleted already; None if it is outside the run's folder."""
        try:
            return self.store.folder(self._checkpoint_url(event))
        except ArtifactError as error:
            log.warning("checkpoint_outside", attempt=self.attempt_id, detail=str(error))
            return None

    def _checkpoint_url(self, event: CheckpointEvent) -> str:
        return f"{self.claim.claimed.artifact_url.rstrip('/')}/{event.folder}"

    def _back_off(self, error: Exception, wait_s: float, closing: bool) -> None:
        if isinstance(error, Unreachable | OSError):
            what = "platform_away" if isinstance(error, Unreachable) else "disk"
            log.info(what, attempt=self.attempt_id, detail=str(error)[:200])
        else:  # such as an unexpected response
            log.error("shipping_failed", attempt=self.attempt_id, exc_info=error)
        retry_after = error.retry_after_s if isinstance(error, Unreachable) else None
        wait_s = min(retry_after, MAX_RETRY_AFTER_S) if retry_after is not None else wait_s * random.uniform(0.5, 1.0)  # noqa: S311
        # The engine's end interrupts the wait, also if it came during this iteration.
        (self._stop if closing else self._closing).wait(wait_s)
