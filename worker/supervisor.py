"""One attempt, from claim to outcome: `python -m worker supervise ATTEMPT EPOCH`, or a fork (worker.prefork).

    claim → start the engine → heartbeat until it ends → ship the rest → report → forget

Guarantees. The claim works once, so a duplicate or stale launch order ends here. The engine dies with this process (lifeline and
kernel). It is killed before the lease can run out, so that the platform never gives its devices away while it computes. The
outcome is sent when no process of the engine is left and every event is acknowledged. If this process is killed, the next one
finds the claim in the attempt's folder, ships what is left and reports the death; it starts no engine. When the platform
asks for events that the disk has no more, the attempt ends here and its run goes on in another one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Literal

import structlog

from oppo_contract.lifeline import watch_lifeline
from oppo_contract.machine import write_private
from oppo_contract.wire import HEARTBEAT_S, AttemptHeartbeat, AttemptOrders, Outcome
from worker.artifacts import ArtifactError
from worker.engine_process import EngineProcess, engine_command, kill_leftover
from worker.folders import AttemptFolder, EngineEnd, KeptClaim, NodeIdentity, WorkerFolder
from worker.local_ranks import cause_of
from worker.logs import last_lines
from worker.outcomes import REFUSED, lost_others, outcome_of
from worker.platform_api import PlatformApi, RefusedError, UnacceptableError, Unreachable
from worker.prefork import inherited_engine_job
from worker.rendezvous import own_address
from worker.uploader import Shipping

LEASE_MARGIN = "OPPO_LEASE_MARGIN_S"
DEFAULT_LEASE_MARGIN_S = 60.0
OUTCOME_TAKES_S = 0.5  # of a deadline, for the report after the engine's end
STOP_WITHIN_S = 12.0  # when the node is shut down: time for a checkpoint
LEAVE_WITHIN_S = 8.0  # and for shipping the rest
LONGEST_WAIT_S = 30.0
OTHERS_SPEAK_WITHIN_S = 6.0
Signal = Literal["cancel", "pause", "preempt"]

log = structlog.get_logger("worker.supervisor")


class Supervisor:
    """Supervises one claimed attempt. `run` is its life; other threads only set events."""

    def __init__(self, folder: AttemptFolder, claim: KeptClaim, node: NodeIdentity) -> None:
        self.folder, self.claim, self.node = folder, claim, node
        meeting = claim.claimed.rendezvous
        self.rank = 0 if meeting is None else meeting.node_rank
        token = claim.claimed.attempt_token
        self.api = PlatformApi(node.platform_url, token)
        self.shipping = Shipping(folder, claim, PlatformApi(node.platform_url, token), on_started=self._on_started)
        self.engine: EngineProcess | None = None
        self.engine_started = False
        self.told_running = False
        self.fenced = False
        self.signal: Signal | None = None
        self.reason: str | None = None
        self.kill_at = float("inf")
        self.lease_ends = time.monotonic() + claim.claimed.lease_s
        self.leaving = threading.Event()
        self._wake = threading.Event()

    def run(self) -> None:
        """Start the engine, watch it, ship, report. A kept claim of a dead supervisor is only shipped and reported."""
        shipping = threading.Thread(target=self.shipping.run, name="shipping", daemon=True)
        if self.folder.engine_end() is None and not self.folder.session_file.exists():
            self._start_engine()
        else:
            kill_leftover(self.folder)
            self.folder.stuck_file.unlink(missing_ok=True)
        shipping.start()
        if self.engine is not None:
            self._watch(self.engine)
        self._drain()
        if self.shipping.complete.is_set():
            self._report()

    def stop(self) -> None:
        """The node shuts down: save, requeue, go. Called from a signal handler, so it only sets flags."""
        self.leaving.set()
        self._wake.set()

    def _start_engine(self) -> None:
        claimed = self.claim.claimed
        try:
            if self.rank == 0:  # otherwise that is the first node's business
                self.shipping.keeper.begin()
            command = engine_command(claimed, self.folder, self.node)
            job = inherited_engine_job()
            self.engine = EngineProcess(command, self.folder, claimed.device_indices, claimed.secrets, self._wake.set, job)
        except ArtifactError as error:
            self._keep_end(EngineEnd(exit_code=REFUSED, reason=str(error)))
            return
        except OSError as error:  # of a disk or a machine; the next attempt, here or elsewhere, may find it well
            self._keep_end(EngineEnd(exit_code=os.EX_IOERR, reason=f"the engine could not be started: {error}"))
            return
        log.info("engine_started", attempt=self.folder.attempt_id, run=self.claim.claimed.run_id)

    def _watch(self, engine: EngineProcess) -> None:
        """Heartbeat every two seconds, and when it has started, until the engine has ended; obey what the replies say."""
        next_beat = time.monotonic()
        while not engine.ended:
            now = time.monotonic()
            if now >= next_beat or (self.engine_started and not self.told_running):
                next_beat = now + HEARTBEAT_S
                self._beat()
            self._act(engine)
            self._wake.wait(max(0.0, min(next_beat, self.kill_at) - time.monotonic()))
            self._wake.clear()
        engine.clear_away()
        self._keep_end(EngineEnd(exit_code=engine.exit_code, signal=self.signal, reason=self.reason))
        log.info("engine_ended", attempt=self.folder.attempt_id, exit_code=engine.exit_code, signal=self.signal)

    def _beat(self) -> None:
        """Renew the lease and take orders; without an answer everything goes on until the lease nears its end."""
        sent_at, running = time.monotonic(), self.engine_started  # which may start while the call is under way
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
        self.told_running = running
        if self.rank == 0:  # which alone names checkpoints
            self.shipping.spare_for_others(orders.spare)
        self._take_order(orders)

    def _take_order(self, orders: AttemptOrders) -> None:
        if orders.signal is None or self.engine is None or self.signal == orders.signal:
            return
        first = self.signal is None
        self.signal = orders.signal
        self.kill_at = min(self.kill_at, time.monotonic() + max(0.0, orders.deadline_s - OUTCOME_TAKES_S))
        if first:
            self.engine.ask_to_stop()
        try:
            self.shipping.note(f"{orders.signal} requested")
        except OSError as error:  # a full disk is no reason not to stop in order
            log.warning("disk", attempt=self.folder.attempt_id, detail=str(error))

    def _act(self, engine: EngineProcess) -> None:
        """What time and circumstances demand: the node's shutdown, a lost lease, an engine that takes too long."""
        now = time.monotonic()
        if self.leaving.is_set() and self.signal is None:
            self.signal, self.reason = "preempt", "the worker was shut down"
            self.kill_at = now + STOP_WITHIN_S
            engine.ask_to_stop()
        if self.shipping.lost and not self.fenced:
            self.fenced, self.reason = True, self.shipping.lost
        if now >= self.lease_ends - lease_margin_s(self.claim.claimed.lease_s) and not self.fenced:
            self.fenced = True
            # No death: an outage that the platform does not hold against a lease must not use up a run's attempts either.
            self.signal = self.signal or "preempt"
            self.reason = "the platform could not be reached and the lease was about to expire"
        if now >= self.kill_at:
            self.reason = self.reason or "the engine did not stop before the deadline and was killed"
        if self.fenced or now >= self.kill_at:
            engine.kill()
            self._wake.wait(HEARTBEAT_S)  # the end is noticed by another thread

    def _drain(self) -> None:
        """Wait until everything is acknowledged, renewing the lease meanwhile; a shutdown does not wait for ever."""
        self.shipping.close()
        leave_at = float("inf")
        while not self.shipping.complete.wait(HEARTBEAT_S):
            if not self.fenced:
                self._beat()
            if self.leaving.is_set():
                leave_at = min(leave_at, time.monotonic() + LEAVE_WITHIN_S)
            if time.monotonic() > leave_at:
                self.shipping.leave()
                return

    def _report(self) -> None:
        """Send the outcome until it is answered, then forget the attempt."""
        if self.engine_started and not self.told_running and not self.fenced:
            self._beat()  # it was quick, but it did run
        end = self.folder.engine_end()
        said = last_lines(self.folder, self.shipping.redactor)
        finished = cause_of(self.shipping.finished, self.folder, self.shipping.redactor)
        if lost_others(finished) and self.claim.claimed.rendezvous is not None:
            self._let_others_speak()
        outcome = outcome_of(self.claim.epoch, end, finished, said, self.shipping.lost)
        wait_s = 0.5
        while not self._reported(outcome):
            if self.leaving.wait(wait_s):
                return
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        self.folder.remove()

    def _let_others_speak(self) -> None:
        """The node on which it began knows the cause: its report comes first if it lives to make one, and then we are refused."""
        until = time.monotonic() + OTHERS_SPEAK_WITHIN_S
        while not self.fenced and time.monotonic() < until and not self.leaving.wait(HEARTBEAT_S / 2):
            self._beat()

    def _reported(self, outcome: Outcome) -> bool:
        try:
            self.api.report_outcome(self.folder.attempt_id, outcome)
        except Unreachable as error:
            log.info("platform_away", attempt=self.folder.attempt_id, detail=str(error)[:200])
            return False
        except (RefusedError, UnacceptableError) as error:
            log.warning("outcome_refused", attempt=self.folder.attempt_id, outcome=outcome.outcome, detail=str(error))
        return True

    def _keep_end(self, end: EngineEnd) -> None:
        write_private(self.folder.end_file, end.model_dump_json())

    def _on_started(self) -> None:
        self.engine_started = True
        self._wake.set()


def lease_margin_s(lease_s: float) -> float:
    """How long before its lease ends an engine is killed, seconds: a minute, and for short leases a third."""
    return min(float(os.environ.get(LEASE_MARGIN, DEFAULT_LEASE_MARGIN_S)), lease_s / 3)


def claim_attempt(folder: AttemptFolder, epoch: int, node: NodeIdentity) -> KeptClaim | None:
    """The attempt's claim: an earlier supervisor's, or a new one; None when it is not ours or nobody answers."""
    kept = folder.kept_claim()
    if kept is not None:
        return kept
    try:
        with PlatformApi(node.platform_url, node.node_token) as api:
            claimed = api.claim(folder.attempt_id, epoch, own_address(node.platform_url))
    except (RefusedError, UnacceptableError) as error:
        log.info("claim_refused", attempt=folder.attempt_id, epoch=epoch, detail=str(error))
        return None
    except Unreachable as error:  # the next heartbeat lists the attempt again
        log.info("platform_away", attempt=folder.attempt_id, detail=str(error)[:200])
        return None
    kept = KeptClaim(epoch=epoch, claimed=claimed)
    write_private(folder.claim_file, kept.model_dump_json())
    return kept


def supervise(attempt_id: int, epoch: int) -> int:
    """The supervisor's main program. Returns 0, also when the attempt turns out not to be ours."""
    watch_lifeline()
    worker = WorkerFolder.from_environment()
    node = worker.identity()
    if node is None:
        raise SystemExit("this node has not joined a platform: oppo worker join URL TOKEN")
    folder = worker.attempt(attempt_id)
    with folder.locked(epoch) as held:
        if not held:
            return 0
        claim = claim_attempt(folder, epoch, node)
        if claim is None:
            folder.remove()
            return 0
        supervisor = Supervisor(folder, claim, node)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: supervisor.stop())
        try:
            supervisor.run()
        except TimeoutError as error:
            # It hangs in the kernel. No outcome is sent while it is there; the agent says so of its devices, and tries again.
            log.error("engine_does_not_end", attempt=attempt_id, detail=str(error))
            write_private(folder.stuck_file, f"attempt {attempt_id} could not be cleaned up: {error}")
            return 1
    return 0
