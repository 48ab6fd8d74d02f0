"""Supervises one attempt from claim to outcome: `python -m worker supervise ATTEMPT EPOCH`, or a fork (worker.prefork).

    claim → start the engine → heartbeat until it ends → upload the rest → report the outcome → delete the attempt's folder

Guarantees. A claim succeeds once, so a duplicate or stale launch order has no effect. The engine ends with this process (lifeline
and PR_SET_PDEATHSIG). It is killed before the lease expires, so its devices are never reallocated while it computes. The outcome
is sent when no process of the engine is left and every event is acknowledged. If this process is killed, the next supervisor
finds the claim in the attempt's folder, uploads the rest and reports the failure; it starts no engine. If the platform requests
events that are no longer on disk, the attempt ends and the run continues in another one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack, closing
from typing import Literal

import structlog

from oppo_contract.lifeline import watch_lifeline
from oppo_contract.machine import write_private
from oppo_contract.wire import HEARTBEAT_S, AttemptHeartbeat, AttemptOrders, Outcome
from worker.artifacts import ArtifactError
from worker.engine_process import EngineProcess, engine_command, kill_leftover
from worker.folders import AttemptFolder, EngineEnd, NodeIdentity, SavedClaim, WorkerFolder
from worker.logs import last_lines
from worker.outcomes import SPEC_REJECTED, build_outcome, find_full_disk, find_root_cause, lost_peer
from worker.platform_api import PlatformApi, RefusedError, UnacceptableError, Unreachable
from worker.prefork import inherited_engine_job
from worker.rendezvous import own_address
from worker.uploader import Uploader

LEASE_MARGIN = "OPPO_LEASE_MARGIN_S"
DEFAULT_LEASE_MARGIN_S = 60.0
OUTCOME_RESERVE_S = 0.5  # part of a deadline reserved for reporting the outcome
STOP_TIMEOUT_S = 12.0  # at worker shutdown: for a final checkpoint
FLUSH_TIMEOUT_S = 8.0  # at worker shutdown: for the remaining events
MAX_WAIT_S = 30.0
PEER_REPORT_TIMEOUT_S = 6.0
START_FAILED = "the engine could not be started: {}"
Signal = Literal["cancel", "pause", "preempt"]

log = structlog.get_logger("worker.supervisor")


class Supervisor:
    """Supervises one claimed attempt. `run` runs in the main thread; other threads only set events."""

    def __init__(self, folder: AttemptFolder, claim: SavedClaim, node: NodeIdentity) -> None:
        self.folder, self.claim, self.node = folder, claim, node
        rendezvous = claim.claimed.rendezvous
        self.rank = 0 if rendezvous is None else rendezvous.node_rank
        token = claim.claimed.attempt_token
        self.api = PlatformApi(node.platform_url, token)
        self.uploader = Uploader(folder, claim, PlatformApi(node.platform_url, token), on_started=self._on_started)
        self.engine: EngineProcess | None = None
        self.engine_started = False
        self.reported_running = False
        self.fenced = False
        self.signal: Signal | None = None
        self.reason: str | None = None
        self.kill_at = float("inf")
        self.lease_ends = time.monotonic() + claim.claimed.lease_s
        self.end: EngineEnd | None = None
        self.disk_error = ""
        self.shutdown = threading.Event()
        self._wake = threading.Event()

    def run(self) -> None:
        """Run the attempt. After a killed supervisor: only upload and report."""
        upload_thread = threading.Thread(target=self.uploader.run, name="uploader", daemon=True)
        if self.folder.engine_end() is None and not self.folder.session_file.exists():
            self._start_engine()
        else:
            kill_leftover(self.folder)
            self.folder.stuck_file.unlink(missing_ok=True)
        upload_thread.start()
        if self.engine is not None:
            self._watch(self.engine)
        self._drain()
        if self.uploader.complete.is_set():
            self._report()

    def stop(self) -> None:
        """Worker shutdown: save, requeue, exit. Called from a signal handler, so it only sets flags."""
        self.shutdown.set()
        self._wake.set()

    def _start_engine(self) -> None:
        claimed = self.claim.claimed
        try:
            if self.rank == 0:  # only the first node pins checkpoints
                self.uploader.pins.begin()
            command = engine_command(claimed, self.folder, self.node)
            job = inherited_engine_job()
            self.engine = EngineProcess(command, self.folder, claimed.device_indices, claimed.secrets, self._wake.set, job)
        except ArtifactError as error:
            self._save_end(EngineEnd(exit_code=SPEC_REJECTED, reason=str(error)))
            return
        except OSError as error:  # may be temporary or specific to this node: the run is retried
            self._save_end(EngineEnd(exit_code=os.EX_IOERR, reason=START_FAILED.format(error), node_failed=True))
            return
        log.info("engine_started", attempt=self.folder.attempt_id, run=self.claim.claimed.run_id)

    def _watch(self, engine: EngineProcess) -> None:
        """Send heartbeats, every 2 s and when the engine has started, until the engine ends."""
        next_heartbeat = time.monotonic()
        while not engine.ended:
            now = time.monotonic()
            if now >= next_heartbeat or (self.engine_started and not self.reported_running):
                next_heartbeat = now + HEARTBEAT_S
                self._heartbeat()
            self._enforce_deadlines(engine)
            self._wake.wait(max(0.0, min(next_heartbeat, self.kill_at) - time.monotonic()))
            self._wake.clear()
        engine.clean_up()
        self._save_end(EngineEnd(exit_code=engine.exit_code, signal=self.signal, reason=self.reason))
        log.info("engine_ended", attempt=self.folder.attempt_id, exit_code=engine.exit_code, signal=self.signal)

    def _heartbeat(self) -> None:
        """Renew the lease and apply orders. Without a response the engine continues until the lease almost expires."""
        sent_at, running = time.monotonic(), self.engine_started  # may change during the call
        try:
            orders = self.api.attempt_heartbeat(self.folder.attempt_id, AttemptHeartbeat(epoch=self.claim.epoch, running=running))
        except Unreachable:
            return
        except (RefusedError, UnacceptableError) as error:
            log.warning("fenced", attempt=self.folder.attempt_id, detail=str(error))
            self.fenced = True
            self.reason = f"the platform no longer accepts this attempt: {error}"
            return
        self.lease_ends = sent_at + orders.lease_s
        self.reported_running = running
        if self.rank == 0:  # only the first node pins checkpoints
            self.uploader.pin_for_others(orders.spare)
        self._apply_signal(orders)

    def _apply_signal(self, orders: AttemptOrders) -> None:
        if orders.signal is None or self.engine is None or self.signal == orders.signal:
            return
        first = self.signal is None
        self.signal = orders.signal
        self.kill_at = min(self.kill_at, time.monotonic() + max(0.0, orders.deadline_s - OUTCOME_RESERVE_S))
        if first:
            self.engine.request_stop()
        try:
            self.uploader.log(f"{orders.signal} requested")
        except OSError as error:  # a full disk must not prevent the stop
            log.warning("disk", attempt=self.folder.attempt_id, detail=str(error))

    def _enforce_deadlines(self, engine: EngineProcess) -> None:
        """Stop the engine at worker shutdown; kill it when the lease, a deadline or undeliverable events require it."""
        now = time.monotonic()
        if self.shutdown.is_set() and self.signal is None:
            self.signal, self.reason = "preempt", "the worker was shut down"
            self.kill_at = now + STOP_TIMEOUT_S
            engine.request_stop()
        if self.uploader.lost and not self.fenced:
            self.fenced, self.reason = True, self.uploader.lost
        if now >= self.lease_ends - lease_margin_s(self.claim.claimed.lease_s) and not self.fenced:
            self.fenced = True
            # Not a failure: an outage of the platform must not use up the run's attempts.
            self.signal = self.signal or "preempt"
            self.reason = "the platform could not be reached and the lease was about to expire"
        if now >= self.kill_at:
            self.reason = self.reason or "the engine did not stop before the deadline and was killed"
        if self.fenced or now >= self.kill_at:
            engine.kill()
            self._wake.wait(HEARTBEAT_S)  # `EngineProcess` notices the exit in its own thread and sets it

    def _drain(self) -> None:
        """Renew the lease until all events are acknowledged; at worker shutdown, at most `FLUSH_TIMEOUT_S`."""
        self.uploader.close()
        flush_until = float("inf")
        while not self.uploader.complete.wait(HEARTBEAT_S):
            if not self.fenced:
                self._heartbeat()
            if self.shutdown.is_set():
                flush_until = min(flush_until, time.monotonic() + FLUSH_TIMEOUT_S)
            if time.monotonic() > flush_until:
                self.uploader.stop()
                return

    def _report(self) -> None:
        """Send the outcome until the platform responds, then delete the attempt's folder."""
        if self.engine_started and not self.reported_running and not self.fenced:
            self._heartbeat()  # a short run must still be reported as running
        end = self.end or self.folder.engine_end()
        lines = last_lines(self.folder, self.uploader.redactor)
        finished = find_root_cause(self.uploader.finished, self.folder, self.uploader.redactor)
        if lost_peer(finished) and self.claim.claimed.rendezvous is not None:
            self._wait_for_peer_report()
        texts = [
            self.disk_error,
            *lines,
            *(reported.reason for reported in (end, finished) if reported is not None and reported.reason),
        ]
        folders = [self.folder.path, self.uploader.store.root]
        disk_full = find_full_disk(texts, folders, was_full=self.uploader.limit.disk_was_full())
        outcome = build_outcome(self.claim.epoch, end, finished, lines, self.uploader.lost, disk_full)
        wait_s = 0.5
        while not self._send_outcome(outcome):
            if self.shutdown.wait(wait_s):
                return
            wait_s = min(2 * wait_s, MAX_WAIT_S)
        self.folder.remove()

    def _wait_for_peer_report(self) -> None:
        """Let the node with the root cause report first; the platform then rejects this node's heartbeats."""
        until = time.monotonic() + PEER_REPORT_TIMEOUT_S
        while not self.fenced and time.monotonic() < until and not self.shutdown.wait(HEARTBEAT_S / 2):
            self._heartbeat()

    def _send_outcome(self, outcome: Outcome) -> bool:
        try:
            self.api.report_outcome(self.folder.attempt_id, outcome)
        except Unreachable as error:
            log.info("platform_away", attempt=self.folder.attempt_id, detail=str(error)[:200])
            return False
        except (RefusedError, UnacceptableError) as error:
            log.warning("outcome_refused", attempt=self.folder.attempt_id, outcome=outcome.outcome, detail=str(error))
        return True

    def _save_end(self, end: EngineEnd) -> None:
        """Keep the end, also on disk for a later supervisor, which without it reports that this one was killed."""
        self.end = end
        try:
            write_private(self.folder.end_file, end.model_dump_json())
        except OSError as error:
            self.disk_error = str(error)
            log.warning("disk", attempt=self.folder.attempt_id, detail=str(error))

    def _on_started(self) -> None:
        self.engine_started = True
        self._wake.set()


def lease_margin_s(lease_s: float) -> float:
    """Seconds before the end of a lease at which the engine is killed: at most a third of the lease."""
    return min(float(os.environ.get(LEASE_MARGIN, DEFAULT_LEASE_MARGIN_S)), lease_s / 3)


def claim_attempt(attempt_id: int, epoch: int, node: NodeIdentity) -> SavedClaim | None:
    """Claim an attempt; None if it is rejected or the platform does not respond."""
    try:
        with closing(PlatformApi(node.platform_url, node.node_token)) as api:
            return SavedClaim(epoch=epoch, claimed=api.claim(attempt_id, epoch, own_address(node.platform_url)))
    except (RefusedError, UnacceptableError) as error:
        log.info("claim_refused", attempt=attempt_id, epoch=epoch, detail=str(error))
    except Unreachable as error:  # retried after the agent's next heartbeat
        log.info("platform_away", attempt=attempt_id, detail=str(error)[:200])
    return None


def report_unusable_disk(attempt_id: int, claim: SavedClaim, node: NodeIdentity, error: OSError) -> None:
    """Report that the attempt's files cannot be written, so that the run continues elsewhere or later.

    A report that does not arrive is not repeated: nothing can be saved for it. The lease then expires.
    """
    log.error("disk", attempt=attempt_id, detail=str(error))
    disk_full = find_full_disk([str(error)], [WorkerFolder.from_environment().path])
    end = EngineEnd(exit_code=os.EX_IOERR, reason=START_FAILED.format(error), node_failed=True)
    try:
        with closing(PlatformApi(node.platform_url, claim.claimed.attempt_token)) as api:
            api.report_outcome(attempt_id, build_outcome(claim.epoch, end, None, [], disk_full=disk_full))
    except (RefusedError, UnacceptableError, Unreachable) as refused:
        log.warning("outcome_lost", attempt=attempt_id, detail=str(refused)[:200])


def supervise(attempt_id: int, epoch: int) -> int:
    """Main program of the supervisor. Returns 0, or 1 if processes of the engine cannot be killed."""
    watch_lifeline()
    worker = WorkerFolder.from_environment()
    node = worker.identity()
    if node is None:
        raise SystemExit("this node has not joined a platform: oppo worker join URL TOKEN")
    folder, claim = worker.attempt(attempt_id), None
    with ExitStack() as stack:
        try:
            if not stack.enter_context(folder.locked(epoch)):
                return 0
            claim = folder.saved_claim()  # of an earlier supervisor
            if claim is None:
                claim = claim_attempt(attempt_id, epoch, node)
                if claim is None:
                    folder.remove()
                    return 0
                write_private(folder.claim_file, claim.model_dump_json())
        except OSError as error:
            claim = claim or claim_attempt(attempt_id, epoch, node)
            if claim is not None:
                report_unusable_disk(attempt_id, claim, node, error)
            return 0
        return _supervise_claimed(folder, claim, node)


def _supervise_claimed(folder: AttemptFolder, claim: SavedClaim, node: NodeIdentity) -> int:
    supervisor = Supervisor(folder, claim, node)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: supervisor.stop())
    try:
        supervisor.run()
    except TimeoutError as error:
        # A process hangs in the kernel. The agent reports the devices as unhealthy and starts a supervisor again.
        log.error("engine_does_not_end", attempt=folder.attempt_id, detail=str(error))
        write_private(folder.stuck_file, f"attempt {folder.attempt_id} could not be cleaned up: {error}")
        return 1
    return 0
