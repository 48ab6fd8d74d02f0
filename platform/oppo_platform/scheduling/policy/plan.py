"""The plan of one scheduler cycle, as a sequence of the policy's parts.

Guarantees: no device is allocated twice; no team exceeds its quota and borrow cap; a run gets all its devices or none (gang
scheduling); every waiting run is placed or has a reason; equal snapshots give equal plans, in any order of their parts.
"""

from __future__ import annotations

from oppo_platform.scheduling.policy.backfill import backfill
from oppo_platform.scheduling.policy.blocked_runs import block, nothing_starts, preempt_for
from oppo_platform.scheduling.policy.feasibility import infeasible_reason, partition
from oppo_platform.scheduling.policy.placement import ClusterDevices, Demand
from oppo_platform.scheduling.policy.plan_state import PlanState
from oppo_platform.scheduling.policy.queue import Queue
from oppo_platform.scheduling.policy.quota import Tier
from oppo_platform.scheduling.policy.reasons import explain
from oppo_platform.scheduling.policy.snapshot import Decisions, Reason, Snapshot, WaitingRun

# Blocked runs at which the plan first looks whether any later run can start; then at twice as many each time.
FIRST_CHECK = 64


def plan(snapshot: Snapshot, now: float) -> Decisions:
    """Placements, preemptions, reservations, and the reasons of waiting runs; `now` in POSIX seconds."""
    state = PlanState(snapshot, now)
    eligible, infeasible = partition(snapshot.waiting, state.cluster, snapshot.teams, now)
    queue = Queue(eligible, state.tiers, state.shares, snapshot.reservations)
    checked = FIRST_CHECK
    for run, tier in queue.turns():
        demand = state.cluster.demand(run)
        if start(run, demand, state, tier) or queue.defer(run, tier):
            continue
        if not (backfill(run, demand, state) or preempt_for(run, demand, state)):
            block(run, demand, state)
        if len(state.blocked) >= checked:
            checked *= 2
            if nothing_starts(queue.later, state):
                state.rest = queue.rest()
                break
    last = sorted((run for run in snapshot.waiting if run.run_id in infeasible), key=lambda run: (run.team_id, run.place_in_team))
    return Decisions(
        placements=tuple(state.placements),
        preemptions=tuple(state.preemptions),
        reservations=tuple(state.reservations),
        reasons=infeasible | explain(state),
        order=(*(blocked.run.run_id for blocked in state.blocked), *(run.run_id for run in (*state.rest, *last))),
    )


def start(run: WaitingRun, demand: Demand, state: PlanState, tier: Tier) -> bool:
    """Start the run on free devices that are not reserved, in places up to its turn's tier."""
    for place in state.options(run, min(tier, Tier.BORROWED)):
        devices = state.cluster.fit(demand, place)
        if devices is not None:
            state.place(run, place, devices)
            return True
    return False


def feasible_ever(run: WaitingRun, snapshot: Snapshot) -> Reason | None:
    """Why the run could never start, on all registered nodes with every device ready and free; None: it could."""
    return infeasible_reason(run, snapshot, ClusterDevices(snapshot, 0.0))
