"""One cycle's plan: the entry point of the policy.

Guarantees: no device is assigned twice; no team exceeds its quota and borrow cap; a run gets all its devices or none; every
waiting run is placed or has a reason; equal snapshots give equal plans in any order of their parts.
"""

from __future__ import annotations

from oppo_platform.scheduling.policy.backfill import backfill
from oppo_platform.scheduling.policy.blocked_runs import make_way, wait
from oppo_platform.scheduling.policy.feasibility import infeasible_reason, partition
from oppo_platform.scheduling.policy.placement import ClusterDevices, Demand
from oppo_platform.scheduling.policy.plan_state import PlanState
from oppo_platform.scheduling.policy.queue import Queue
from oppo_platform.scheduling.policy.quota import Tier
from oppo_platform.scheduling.policy.reasons import explain
from oppo_platform.scheduling.policy.snapshot import Decisions, Reason, Snapshot, WaitingRun


def plan(snapshot: Snapshot, now: float) -> Decisions:
    """Decide starts, preemptions, reservations and reasons of waiting runs; `now` in POSIX seconds."""
    board = PlanState(snapshot, now)
    eligible, hopeless = partition(snapshot.waiting, board.room, snapshot.teams, now)
    queue = Queue(eligible, board.tiers, board.shares, snapshot.reservations)
    for run, tier in queue.turns():
        demand = board.room.demand(run)
        if start(run, demand, board, tier) or queue.defer(run, tier):
            continue
        if not (backfill(run, demand, board) or make_way(run, demand, board)):
            wait(run, demand, board)
    return Decisions(
        placements=tuple(board.placements),
        preemptions=tuple(board.preemptions),
        reservations=tuple(board.reservations),
        reasons=hopeless | explain(board),
        order=(*(blocked.run.run_id for blocked in board.blocked), *sorted(hopeless)),
    )


def start(run: WaitingRun, demand: Demand, board: PlanState, tier: Tier) -> bool:
    """Start the run on free unreserved devices, if it may borrow as much in this turn."""
    for place in board.options(run, min(tier, Tier.BORROWED)):
        devices = board.room.fit(demand, place)
        if devices is not None:
            board.place(run, place, devices)
            return True
    return False


def feasible_ever(run: WaitingRun, snapshot: Snapshot) -> Reason | None:
    """Why the run could never start; None: it could.

    Judged on all registered nodes, also unreachable ones, with every device in order and free.
    """
    return infeasible_reason(run, snapshot, ClusterDevices(snapshot, 0.0))
