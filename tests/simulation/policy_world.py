"""A cluster that lives by the policy's plans: runs start, work, stop when asked, come back, end. Time is a number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import oppo_platform.scheduling.policy as policy
from oppo_platform.scheduling.policy import Node, PolicySettings, Pool, Quota, Reservation, RunningRun, Snapshot, Team, WaitingRun
from oppo_platform.scheduling.policy.fair_share import accrued, decayed
from tests.simulation.policy_properties import ids_of

STEPS = 1000  # every run has so many; its speed follows from its length


@dataclass
class Job:
    """A run with the work it has left, in seconds on its devices; `known`: whether its estimate is measured."""

    run: WaitingRun
    left_s: float
    known: bool = True
    started_first: float | None = None
    promised: float | None = None  # the first start that was ever reserved for it

    def waiting(self) -> WaitingRun:
        """As the policy sees it in the queue."""
        return replace(self.run, steps_left=STEPS, steps_per_s=STEPS / self.left_s) if self.known else self.run


class World:
    """Steps of one plan each."""

    def __init__(self, nodes: list[Node], teams: list[Team], settings: PolicySettings) -> None:
        """An empty cluster at instant 0."""
        self.nodes, self.settings, self.now = nodes, settings, 0.0
        self.teams = {team.team_id: team for team in teams}
        self.queue: dict[int, Job] = {}
        self.running: dict[int, RunningRun] = {}
        self.jobs: dict[int, Job] = {}
        self.leaves_at: dict[int, float] = {}
        self.reservations: tuple[Reservation, ...] = ()
        self.preempted: Counter[int] = Counter()
        self.pushed_out: list[tuple[int, int]] = []  # (victim, for whom)
        self.ended: dict[int, float] = {}

    def submit(self, job: Job) -> None:
        """A new run."""
        self.queue[job.run.run_id] = self.jobs[job.run.run_id] = job

    def snapshot(self) -> Snapshot:
        """What the policy sees now."""
        holder = {d: run.run_id for run in self.running.values() for d in ids_of(run)}
        held = [tuple(replace(d, held_by=holder.get(d.device_id)) for d in n.devices) for n in self.nodes]
        nodes = tuple(replace(n, devices=devices) for n, devices in zip(self.nodes, held, strict=True))
        pools = tuple(Pool(i, f"pool{i}") for i in sorted({n.pool_id for n in self.nodes}))
        waiting = tuple(replace(job.waiting(), preempted=self.preempted[number]) for number, job in self.queue.items())
        busy = tuple(self._seen(run) for run in self.running.values())
        return Snapshot(pools, nodes, tuple(self.teams.values()), waiting, busy, self.reservations, self.settings)

    def _seen(self, run: RunningRun) -> RunningRun:
        job = self.jobs[run.run_id]
        limit = None if job.run.max_runtime_s is None else run.started_at + job.run.max_runtime_s
        return replace(run, expected_end=self.now + job.left_s if job.known else limit, preempted=self.preempted[run.run_id])

    def step(self, seconds: float) -> policy.Decisions:
        """Plan, carry the plan out, and let time pass; runs end and leave at the instants at which they do."""
        decisions = policy.plan(self.snapshot(), self.now)
        self.reservations = decisions.reservations
        for reservation in decisions.reservations:
            job = self.jobs[reservation.run_id]
            job.promised = reservation.start if job.promised is None else job.promised
        for placement in decisions.placements:
            job = self.queue.pop(placement.run_id)
            job.started_first = self.now if job.started_first is None else job.started_first
            run = job.run
            self.running[run.run_id] = RunningRun(
                run.run_id, run.team_id, placement.devices, run.priority, run.preemptible, self.now, backfill=placement.backfill
            )
        for preemption in decisions.preemptions:
            self.preempted[preemption.run_id] += 1
            self.pushed_out.append((preemption.run_id, preemption.for_run_id))
            self.running[preemption.run_id] = replace(self.running[preemption.run_id], stopping=True)
            self.leaves_at[preemption.run_id] = self.now + self.settings.stop_s
        self._pass(seconds)
        return decisions

    def _pass(self, seconds: float) -> None:
        self._settle(seconds)
        for run in list(self.running.values()):
            job = self.jobs[run.run_id]
            job.left_s -= seconds
            if job.left_s <= 1e-9:
                self.ended[run.run_id] = self.now + seconds + job.left_s
                del self.running[run.run_id]
            elif self.leaves_at.get(run.run_id, 1e99) <= self.now + seconds:
                del self.running[run.run_id], self.leaves_at[run.run_id]
                self.queue[run.run_id] = job
        self.now += seconds

    def _settle(self, seconds: float) -> None:
        for team in self.teams.values():
            held = sum(len(ids_of(run)) for run in self.running.values() if run.team_id == team.team_id)
            used = decayed(team.usage_gpu_s, seconds, self.settings.half_life_s)
            used += accrued(held, seconds, self.settings.half_life_s)
            self.teams[team.team_id] = replace(team, usage_gpu_s=used, usage_at=self.now + seconds)


def team(team_id: int, quotas: dict[int, Quota] | None = None, weight: float = 1.0) -> Team:
    """A team with no usage yet."""
    return Team(team_id, f"team{team_id}", weight, quotas or {})
