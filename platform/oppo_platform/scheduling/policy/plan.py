"""One cycle's plan: the table of contents of the policy.

Guarantees: no device is given twice; no team gets beyond its quota and borrow cap; a run gets all its devices or none; every
waiting run is placed or has a reason; equal snapshots give equal plans, in whatever order their parts are listed.
"""

from __future__ import annotations

from oppo_platform.scheduling.policy.backfill import backfill
from oppo_platform.scheduling.policy.blocked_runs import make_way, wait
from oppo_platform.scheduling.policy.feasibility import never, sift
from oppo_platform.scheduling.policy.placement import Demand, Room
from oppo_platform.scheduling.policy.plan_state import Board
from oppo_platform.scheduling.policy.queue import Queue
from oppo_platform.scheduling.policy.quota import Tier
from oppo_platform.scheduling.policy.reasons import explain
from oppo_platform.scheduling.policy.snapshot import Decisions, Reason, Snapshot, WaitingRun


def plan(snapshot: Snapshot, now: float) -> Decisions:
    """Decide who starts where, who makes room, what is reserved, and what everyone else waits for; `now` in POSIX seconds."""
    board = Board(snapshot, now)
    eligible, hopeless = sift(snapshot.waiting, board.room, snapshot.teams, now)
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


def start(run: WaitingRun, demand: Demand, board: Board, tier: Tier) -> bool:
    """Start the run on free devices that nobody has reserved, if its turn is one for what it would borrow."""
    for place in board.options(run, min(tier, Tier.BORROWED)):
        devices = board.room.fit(demand, place)
        if devices is not None:
            board.place(run, place, devices)
            return True
    return False


def feasible_ever(run: WaitingRun, snapshot: Snapshot) -> Reason | None:
    """Why the run could never start; None: it could.

    Judged on all registered nodes, also those that are away, with every device in order and nobody else there.
    """
    return never(run, snapshot, Room(snapshot, 0.0))
