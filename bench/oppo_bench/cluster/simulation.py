"""Simulates a trace in virtual time: submissions arrive, a planner decides, runs end, preempted runs resume from a checkpoint.

The planner sees a `policy.Snapshot` as the scheduler's does, without true durations. Instants are seconds since the trace's
beginning. A planner that assigns a device twice, or only part of a gang, raises ValueError.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from oppo_bench.cluster.trace import Submission, Trace
from oppo_platform.scheduling.policy import (
    Decisions,
    Placement,
    PolicySettings,
    RunningRun,
    Snapshot,
    Team,
    WaitingRun,
    feasible_ever,
)
from oppo_platform.scheduling.policy.fair_share import accrued

Planner = Callable[[Snapshot, float], Decisions]
NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Conduct:
    """Behaviour of the platform around the planner; all in seconds."""

    cycle_s: float = 10.0  # least time between two plans
    recheck_s: float = 60.0  # most time between two plans while a run waits: shares change without an event
    checkpoint_s: float = 900.0  # interval of checkpoints
    measured_s: float = 300.0  # after so much work a run's end is known from its steps per second, instead of from its estimate
    restart_s: float = 120.0  # restart time of a preempted run
    policy: PolicySettings = field(default_factory=PolicySettings)


@dataclass(frozen=True, slots=True)
class Hold:
    """Devices held by a run; `lost_s` of its work was lost and `idle_s` were spent on restarting and stopping."""

    run_id: int
    devices: tuple[int, ...]
    start: float
    end: float
    lost_s: float = 0.0
    idle_s: float = 0.0
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """A run was in the queue from `start` to `end`."""

    run_id: int
    start: float
    end: float


@dataclass(slots=True)
class Outcome:
    """Outcome of a simulation. Run ids are 1, 2, … in the order of submission."""

    trace: Trace
    holds: list[Hold] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)  # completion of each run
    refused: dict[int, str] = field(default_factory=dict)  # reason by run that can never start
    stuck: tuple[int, ...] = ()  # still queued at the end of the simulation
    plans: int = 0


class _Kind(IntEnum):
    """Kinds of events; at one instant the lower value is handled first."""

    DONE = 0
    FREED = 1
    SUBMITTED = 2


@dataclass(slots=True)
class _Job:
    """A run in the simulator."""

    run_id: int
    team_id: int
    asked: Submission
    saved_s: float = 0.0  # work saved in a checkpoint
    queued_at: float = 0.0
    started_at: float = 0.0
    restart_s: float = 0.0  # of the current attempt
    attempts: int = 0
    lost_s: float = 0.0  # in the attempt that is being stopped
    idle_s: float = 0.0

    def waiting(self, measured_s: float) -> WaitingRun:
        """As the planner sees it in the queue: with the rest of its estimate, or of its work once its pace was measured."""
        asked, left = self.asked, None
        known = asked.work_s if self.saved_s >= measured_s else asked.estimate_s
        if known is not None:
            left = max(1, math.ceil(known - self.saved_s))
        return WaitingRun(
            run_id=self.run_id, team_id=self.team_id, devices=asked.devices, priority=asked.priority, nodes_max=asked.nodes_max,
            kind=asked.kind, submitted_at=asked.at_s, preemptible=asked.preemptible,
            max_runtime_s=asked.max_runtime_s, steps_left=left, steps_per_s=None if left is None else 1.0,
            preempted=self.attempts,  # every other end of an attempt is final
        )  # fmt: skip

    def running(self, placed: Placement, estimate: float | None) -> RunningRun:
        """As the planner sees it on its devices before its pace was measured."""
        return RunningRun(
            run_id=self.run_id, team_id=self.team_id, devices=placed.devices, priority=self.asked.priority,
            preemptible=self.asked.preemptible, started_at=self.started_at,
            expected_end=None if estimate is None else self.started_at + self.restart_s + estimate, backfill=placed.backfill,
            preempted=self.attempts - 1,
        )  # fmt: skip

    def end(self) -> float:
        """End of the current attempt without preemption."""
        limit = NEVER if self.asked.max_runtime_s is None else self.asked.max_runtime_s
        return self.started_at + min(limit, self.restart_s + self.asked.work_s - self.saved_s)

    def stop(self, now: float, checkpoint_s: float) -> None:
        """Preempt the run: work since its last checkpoint is lost."""
        done = self.saved_s + max(0.0, now - self.started_at - self.restart_s)
        kept = max(self.saved_s, math.floor(done / checkpoint_s) * checkpoint_s)
        self.lost_s, self.saved_s = done - kept, kept


def simulate(
    trace: Trace, planner: Planner, conduct: Conduct, *, quotas: bool = True, ended: Callable[[], None] = lambda: None
) -> Outcome:
    """Simulate the trace to its end. `quotas` False: no team has one; `ended` is called whenever a run ends or is refused.

    Raises ValueError when the planner assigns devices that are not free.
    """
    return _World(trace, planner, conduct, quotas, ended).play()


class _World:
    """State of the cluster, the queue and the event list."""

    def __init__(self, trace: Trace, planner: Planner, conduct: Conduct, quotas: bool, ended: Callable[[], None]) -> None:
        self._planner, self._conduct, self._ended = planner, conduct, ended
        teams = trace.teams() if quotas else tuple(replace(team, quotas={}) for team in trace.teams())
        self._teams = {team.team_id: team for team in teams}
        self._start = Snapshot(trace.pools(), trace.nodes(), teams, settings=conduct.policy)
        self._node_of = {device.device_id: node.node_id for node in self._start.nodes for device in node.devices}
        ids = {team.name: team.team_id for team in teams}
        self._jobs = {number: _Job(number, ids[s.team], s) for number, s in enumerate(trace.submissions, 1)}
        self._events = [(job.asked.at_s, _Kind.SUBMITTED, job.run_id, 0) for job in self._jobs.values()]
        heapq.heapify(self._events)
        self._waiting: dict[int, WaitingRun] = {}
        self._running: dict[int, RunningRun] = {}
        self._unmeasured: set[int] = set()  # running with an unknown end
        self._free = set(self._node_of)
        self._reserved = self._start.reservations
        # GPU-seconds of ended attempts, decayed to instant 0: one number from which every later value follows.
        self._used: dict[int, float] = defaultdict(float)
        self._verdicts: dict[tuple[object, ...], str | None] = {}
        self._planned_at, self._plan_at = -NEVER, NEVER
        self._outcome = Outcome(trace)

    def play(self) -> Outcome:
        """Run until no event is left."""
        while (now := min(self._next_event(), self._plan_at)) < NEVER:
            happened = False
            while self._next_event() <= now:
                self._happen(*heapq.heappop(self._events))
                happened = True
            if happened:
                self._plan_at = min(self._plan_at, max(now, self._planned_at + self._conduct.cycle_s))
            if self._plan_at <= now:
                self._plan(now)
        self._outcome.stuck = tuple(sorted(self._waiting))
        return self._outcome

    def _next_event(self) -> float:
        return self._events[0][0] if self._events else NEVER

    def _happen(self, now: float, kind: _Kind, run_id: int, attempt: int) -> None:
        job = self._jobs[run_id]
        if kind is _Kind.SUBMITTED:
            self._submit(job, now)
        elif kind is _Kind.FREED:
            self._leave(job, now, preempted=True)
            self._queue(job, now)
        elif job.attempts == attempt and run_id in self._running and not self._running[run_id].stopping:
            self._leave(job, now, preempted=False)
            self._outcome.ends[run_id] = now
            self._ended()

    def _submit(self, job: _Job, now: float) -> None:
        run = job.waiting(self._conduct.measured_s)
        key = (run.team_id, run.devices, run.nodes_max, run.kind)
        if key not in self._verdicts:
            reason = feasible_ever(run, self._start)
            self._verdicts[key] = None if reason is None else reason.text
        refusal = self._verdicts[key]
        if refusal is None:
            self._queue(job, now)
        else:
            self._outcome.refused[job.run_id] = refusal
            self._ended()

    def _queue(self, job: _Job, now: float) -> None:
        job.queued_at = now
        self._waiting[job.run_id] = job.waiting(self._conduct.measured_s)

    def _leave(self, job: _Job, now: float, preempted: bool) -> None:
        run = self._running.pop(job.run_id)
        self._unmeasured.discard(job.run_id)
        devices = tuple(device_id for ids in run.devices.values() for device_id in ids)
        self._free.update(devices)
        half_life = self._conduct.policy.half_life_s
        self._used[job.team_id] += accrued(len(devices), now - run.started_at, half_life) * math.exp2(now / half_life)
        held = now - run.started_at
        lost, idle = (job.lost_s, job.idle_s) if preempted else (0.0, min(held, job.restart_s))
        self._outcome.holds.append(Hold(job.run_id, devices, run.started_at, now, lost, idle, preempted))

    def _plan(self, now: float) -> None:
        self._planned_at, self._plan_at = now, NEVER
        if not self._waiting:
            self._reserved = ()
            return
        self._measure(now)
        decided = self._planner(self._snapshot(), now)
        self._outcome.plans += 1
        self._reserved = decided.reservations
        self._begin(decided.placements, now)
        for preemption in decided.preemptions:
            self._stop(self._jobs[preemption.run_id], now)
        if self._waiting and (self._events or self._running):
            self._plan_at = now + max(self._conduct.cycle_s, self._conduct.recheck_s)

    def _measure(self, now: float) -> None:
        """Give the planner the ends of runs that have worked for long enough."""
        jobs = [self._jobs[run_id] for run_id in self._unmeasured]
        for job in jobs:
            if now - job.started_at - job.restart_s >= self._conduct.measured_s:
                self._unmeasured.remove(job.run_id)
                self._running[job.run_id] = replace(self._running[job.run_id], expected_end=job.end())

    def _snapshot(self) -> Snapshot:
        teams = tuple(self._with_usage(team) for team in self._teams.values())
        return replace(
            self._start, teams=teams, waiting=tuple(self._waiting.values()), running=tuple(self._running.values()),
            reservations=self._reserved,
        )  # fmt: skip

    def _with_usage(self, team: Team) -> Team:
        return replace(team, usage_gpu_s=self._used[team.team_id], usage_at=0.0)

    def _begin(self, placements: Iterable[Placement], now: float) -> None:
        for placed in placements:
            job, ids = self._jobs[placed.run_id], placed.device_ids
            self._check(job, placed)
            estimate = self._waiting.pop(job.run_id).estimate_s
            self._free.difference_update(ids)
            self._outcome.waits.append(Wait(job.run_id, job.queued_at, now))
            job.restart_s = self._conduct.restart_s if job.attempts else 0.0
            job.started_at, job.attempts = now, job.attempts + 1
            self._running[job.run_id] = job.running(placed, estimate)
            self._unmeasured.add(job.run_id)
            heapq.heappush(self._events, (job.end(), _Kind.DONE, job.run_id, job.attempts))

    def _check(self, job: _Job, placed: Placement) -> None:
        ids = placed.device_ids
        whole = len(set(ids)) == len(ids) == job.asked.devices and len(placed.devices) <= job.asked.nodes_max
        if job.run_id not in self._waiting or not whole or not self._free.issuperset(ids):
            raise ValueError(f"The planner gave run {job.run_id} devices that are not free, or not what it asked for: {ids}.")

    def _stop(self, job: _Job, now: float) -> None:
        run, stop_s = self._running[job.run_id], self._conduct.policy.stop_s
        if run.stopping:
            raise ValueError(f"The planner stopped run {job.run_id}, which is stopping already.")
        job.stop(now, self._conduct.checkpoint_s)
        job.idle_s = min(now - run.started_at, job.restart_s) + stop_s
        self._running[job.run_id] = replace(run, stopping=True)
        heapq.heappush(self._events, (now + stop_s, _Kind.FREED, job.run_id, job.attempts))
