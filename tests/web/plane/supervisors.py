"""Simulated supervisors: the life of `worker/supervisor.py` and `worker/uploader.py` as steps, with its own words and margins.

A supervisor reads its own clock, which runs a little fast or slow. It may be frozen (a stopped process, a starved machine) and
killed at any step; what it leaves in its attempt's files is what the next one finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oppo_contract import wire
from oppo_contract.events import CheckpointEvent, Event, FinishedEvent, StartedEvent
from tests.web.plane.engines import Engine, Files
from tests.web.plane.network import Serving
from worker.folders import EngineEnd, SavedClaim
from worker.outcomes import build_outcome, lost_peer
from worker.platform_api import GapError, RefusedError, Unreachable
from worker.supervisor import (
    FLUSH_TIMEOUT_S,
    OUTCOME_RESERVE_S,
    PEER_REPORT_TIMEOUT_S,
    STOP_TIMEOUT_S,
    Signal,
    lease_margin_s,
)

if TYPE_CHECKING:
    from tests.web.plane.nodes import SimulatedNode

NEVER = float("inf")
MOST_EVENTS = 4  # a request holds, so that there are several


class Supervisor:
    """One process, from its start to its end. `wake` is one turn of its loop."""

    def __init__(self, node: SimulatedNode, attempt_id: int, epoch: int, files: Files) -> None:
        self.node, self.attempt_id, self.epoch, self.files = node, attempt_id, epoch, files
        self.rng = node.rng
        self.alive = True
        self.engine: Engine | None = None
        self.doing = self._begin
        self.engine_started = self.reported_running = self.fenced = self.leaving = False
        self.signal: Signal | None = None
        self.reason: str | None = None
        self.rank = 0
        self.kill_at = self.leave_at = self.speak_at = NEVER
        self.lease_s = self.lease_ends = 0.0
        self.frozen_until = 0.0
        self.acknowledged = {"engine": 0, "supervisor": 0}
        self.unregistered: list[CheckpointEvent] = []
        self.finished: FinishedEvent | None = None
        self.report_wait_s = 0.5
        self._turn = 0
        self.sleep(self.rng.uniform(0.05, 1.5))

    def sleep(self, seconds: float) -> None:
        """Until the next turn, on its own clock; a later call replaces an earlier one."""
        self._turn += 1
        turn = self._turn
        self.node.plane.agenda.after(seconds / self.node.rate, lambda: self.wake() if turn == self._turn else None)

    def wake(self) -> None:
        """One turn, unless the process is dead or frozen."""
        if not self.alive:
            return
        thaws_in = self.frozen_until - self.node.plane.agenda.now
        if thaws_in > 0:
            self.sleep(thaws_in)
            return
        self.node.plane.say(f"supervisor {self.attempt_id} on {self.node.name}: {self.doing.__name__.strip('_')}")
        self.doing()

    def stop(self) -> None:
        """SIGTERM: save, requeue, go."""
        self.leaving = True
        self.sleep(0.0)

    def kill(self) -> None:
        """SIGKILL: its files stay, its engine's lifeline is cut."""
        self.alive = False
        if self.engine is not None:
            self.engine.lose_lifeline()
        self.node.supervisors.pop(self.attempt_id, None)

    def _begin(self) -> None:
        if self.files.claim is None and not self._claim():
            self._forget()
            return
        assert self.files.claim is not None
        self.epoch = self.files.claim.epoch
        if self.files.claim.claimed.rendezvous is not None:
            self.rank = Serving.rank_of(self.attempt_id, self.node.node_id, self.files.claim.claimed.attempt_token)
        self.lease_s = self.files.claim.claimed.lease_s
        self.lease_ends = self.node.local_now() + self.lease_s
        if self.files.end is None and not self.files.session:
            self._start_engine(self.files.claim)
            self.doing = self._watch
        else:
            self.node.kill_leftover(self.attempt_id)
            self.doing = self._drain
        self.sleep(0.1)

    def _claim(self) -> bool:
        try:
            address = self.node.own_address()
            claimed = self.node.call(lambda: Serving.claim(self.node.node_id, self.attempt_id, self.epoch, address))
        except (RefusedError, Unreachable) as error:
            self.node.plane.say(f"  claim of {self.attempt_id}: {error}")
            return False
        self.files.claim = SavedClaim(epoch=self.epoch, claimed=claimed)
        return True

    def _start_engine(self, claim: SavedClaim) -> None:
        plane = self.node.plane
        meeting = plane.meeting_at(claim.claimed.rendezvous)
        engine = Engine(plane.agenda, self.rng, self.files, claim.claimed, self._hurry, meeting)
        engine.attempt_id, engine.on_end = self.attempt_id, lambda: self.sleep(0.0)
        self.files.session = True
        self.engine = engine
        self.node.engines.append(engine)

    def _hurry(self) -> bool:
        """Below a frozen supervisor an engine takes its time also when all is quiet, so that it may outlive the lease."""
        return self.node.plane.quiet and self.node.plane.agenda.now >= self.frozen_until

    def _watch(self) -> None:
        engine = self.engine
        assert engine is not None
        self._ship()
        if engine.alive:
            self._beat()
            self._act(engine)
        if not engine.alive:
            self.files.end = EngineEnd(exit_code=engine.exit_code, signal=self.signal, reason=self.reason)
            self.doing = self._drain
            self.sleep(0.0)
            return
        self.sleep(max(0.01, min(self.node.beat_s(), self.kill_at - self.node.local_now())))

    def _beat(self) -> None:
        sent_at = self.node.local_now()
        told = wire.AttemptHeartbeat(epoch=self.epoch, running=self.engine_started)
        try:
            orders = self.node.call(lambda: Serving.attempt_heartbeat(self.attempt_id, told, self.rank))
        except Unreachable:
            return
        except RefusedError as error:
            self.fenced = True
            self.reason = f"the platform no longer accepts this attempt: {error}"
            return
        self.lease_ends = sent_at + orders.lease_s
        self.reported_running = self.engine_started
        if orders.signal is not None and self.engine is not None and self.signal != orders.signal:
            self.node.plane.say(f"  told to {orders.signal} within {orders.deadline_s:.1f} s")
            first = self.signal is None
            self.signal = orders.signal
            self.kill_at = min(self.kill_at, sent_at + max(0.0, orders.deadline_s - OUTCOME_RESERVE_S))
            if first:
                self.engine.ask_to_stop()

    def _act(self, engine: Engine) -> None:
        now = self.node.local_now()
        if self.leaving and self.signal is None:
            self.signal, self.reason = "preempt", "the worker was shut down"
            self.kill_at = now + STOP_TIMEOUT_S
            engine.ask_to_stop()
        if now >= self.lease_ends - lease_margin_s(self.lease_s) and not self.fenced:
            self.fenced = True
            self.signal = self.signal or "preempt"
            self.reason = "the platform could not be reached and the lease was about to expire"
        if now >= self.kill_at:
            self.reason = self.reason or "the engine did not stop before the deadline and was killed"
        if self.fenced or now >= self.kill_at:
            engine.kill()

    def _drain(self) -> None:
        if self._ship():
            self.speak_at = self.node.local_now() + PEER_REPORT_TIMEOUT_S
            self.doing = self._let_others_speak if lost_peer(self.finished) else self._report
            self.sleep(0.0)
            return
        if not self.fenced:
            self._beat()
        now = self.node.local_now()
        self.leave_at = min(self.leave_at, now + FLUSH_TIMEOUT_S) if self.leaving else NEVER
        if now > self.leave_at:
            self.kill()
            return
        self.sleep(self.node.beat_s())

    def _let_others_speak(self) -> None:
        if self.fenced or self.leaving or self.node.local_now() >= self.speak_at:
            self.doing = self._report
            self.sleep(0.0)
            return
        self._beat()
        self.sleep(wire.HEARTBEAT_S / 2)

    def _report(self) -> None:
        if self.engine_started and not self.reported_running and not self.fenced:
            self._beat()
        told = build_outcome(self.epoch, self.files.end, self.finished, self.files.last_lines())
        try:
            self.node.call(lambda: Serving.outcome(self.attempt_id, told, self.rank))
            self.node.plane.say(f"  outcome of {self.attempt_id}: {told.outcome}")
        except Unreachable:
            if self.leaving:
                self.kill()
                return
            self.sleep(self.report_wait_s)
            self.report_wait_s = min(2 * self.report_wait_s, 4.0)
            return
        except RefusedError as error:
            self.node.plane.say(f"  outcome of {self.attempt_id} refused: {error}")
        self._forget()

    def _forget(self) -> None:
        """Everything is acknowledged, or it was never ours."""
        self.alive = False
        self.node.supervisors.pop(self.attempt_id, None)
        self.node.files.pop(self.attempt_id, None)

    def _ship(self) -> bool:
        """Send what is not acknowledged. Returns whether nothing is left, or the platform wants no more of it."""
        try:
            self._send("engine", self.files.engine)
            self._register()
            self._send("supervisor", self.files.supervisor)
        except Unreachable:
            return False
        except RefusedError:
            return True
        return True

    def _send(self, producer: str, outbox: list[Event]) -> None:
        while waiting := outbox[self.acknowledged[producer] :]:
            # Now and then a sender that has lost its place begins too late; the answer tells it where to begin.
            skip = 1 if len(waiting) > 1 and self.rng.random() < self.node.plane.gap_chance else 0
            batch = waiting[skip : skip + MOST_EVENTS]
            self._look_at(batch)
            try:
                taken = self.node.call(lambda batch=batch: Serving.events(self.attempt_id, producer, batch, self.rank))  # type: ignore[misc]
            except GapError as gap:
                self.acknowledged[producer] = gap.expected_seq - 1
                continue
            fresh = outbox[self.acknowledged[producer] : taken]
            self.unregistered += [event for event in fresh if isinstance(event, CheckpointEvent)]
            self.acknowledged[producer] = max(taken, self.acknowledged[producer])

    def _look_at(self, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, StartedEvent):
                self.engine_started = True
            elif isinstance(event, FinishedEvent):
                self.finished = event

    def _register(self) -> None:
        assert self.files.claim is not None
        while self.unregistered:
            event = self.unregistered[0]
            told = wire.CheckpointRegistration(
                epoch=self.epoch,
                step=event.step,
                url=f"{self.files.claim.claimed.artifact_url}/{event.folder}",
                manifest_sha256=event.manifest_sha256,
                bytes=event.bytes,
            )
            try:
                self.node.call(lambda told=told: Serving.checkpoint(self.attempt_id, told, self.rank))  # type: ignore[misc]
            except RefusedError as error:
                self.node.plane.say(f"  checkpoint {event.step} of {self.attempt_id} refused: {error}")
            self.unregistered.pop(0)
