"""Handling of a run that cannot start: preempt others for it, or let it wait with a reservation, an estimate, or its turn."""

from __future__ import annotations

from oppo_platform.scheduling.policy.backfill import earliest
from oppo_platform.scheduling.policy.placement import UNKNOWN, Demand, Place
from oppo_platform.scheduling.policy.plan_state import Blocked, PlanState
from oppo_platform.scheduling.policy.preemption import Cause, Cleared, make_room
from oppo_platform.scheduling.policy.snapshot import WaitingRun

STOP_TEXT = {
    Cause.BACKFILL: "It was backfilled ahead of a blocked run, and that run can start now.",
    Cause.RECLAIM: "Its team borrows devices beyond its quota, and another team reclaims them.",
    Cause.PRIORITY: "A run of the team with a higher priority needs its devices.",
}


def make_way(run: WaitingRun, demand: Demand, board: PlanState) -> bool:
    """Preempt runs, or wait for stopping ones, and reserve their devices for the run; False if neither is possible."""
    key = (run.team_id, id(demand), run.priority)
    if key in board.nobody_for or not within_lookahead(demand, board):
        return False
    cleared = make_room(run, demand, board, board.may_stop)
    if cleared is None:
        board.nobody_for.add(key)
        _await(run, demand, board)
        return False
    ready = board.now + board.snapshot.settings.stop_s
    if cleared.victims and _start_by_itself(run, demand, board) <= ready:
        return False
    _clear(run, cleared, board)
    asked_before = any(r.cleared and r.run_id == run.run_id for r in board.snapshot.reservations)
    board.reserve(run, cleared.place, cleared.devices, ready, cleared=bool(cleared.victims) or asked_before)
    board.looked_at[cleared.place.pool_id] += 1
    victims = tuple(victim.run for victim in cleared.victims)
    board.blocked.append(Blocked(run, demand, "preempting", ready, cleared.place, victims))
    return True


def _clear(run: WaitingRun, cleared: Cleared, board: PlanState) -> None:
    for victim in cleared.victims:
        board.stop(victim.run, run, victim.cause.name.lower(), STOP_TEXT[victim.cause])
        for each, ids in victim.by_bin.items():
            each.soon.update(ids)


def _await(run: WaitingRun, demand: Demand, board: PlanState) -> None:
    """Record runs that may be stopped for it once they have run for their minimum time."""
    if all(board.protected_until(other) <= board.now for place in demand.places for other in board.running(place.pool_id)):
        return
    later = make_room(run, demand, board, board.may_stop_later)
    victims = () if later is None else tuple(victim.run for victim in later.victims)
    # With more candidates the search may also end without too young ones.
    if any(board.protected_until(victim) > board.now for victim in victims):
        board.awaited[run.run_id] = victims


def _start_by_itself(run: WaitingRun, demand: Demand, board: PlanState) -> float:
    return min((earliest(demand, place, board, frozenset())[0] for place in board.options(run)), default=UNKNOWN)


def within_lookahead(demand: Demand, board: PlanState) -> bool:
    """Whether one of its pools has fewer handled blocked runs than the lookahead."""
    return any(board.looked_at[place.pool_id] < board.snapshot.settings.lookahead for place in demand.places)


def wait(run: WaitingRun, demand: Demand, board: PlanState) -> None:
    """Record why the run waits; the first of a pool gets a reservation, those up to the lookahead an estimate."""
    options = board.options(run)
    if not within_lookahead(demand, board):
        board.blocked.append(Blocked(run, demand, "devices" if options else "quota", place=(options or demand.places)[0]))
    elif options:
        _wait_for_devices(run, demand, options, board)
    else:
        _wait_for_quota(run, demand, board)


def _wait_for_devices(run: WaitingRun, demand: Demand, options: list[Place], board: PlanState) -> None:
    preferred = board.reserved_before(run)
    result = [(*earliest(demand, place, board, preferred), place) for place in options]
    start, devices, place = min(result, key=lambda entry: entry[0])
    board.looked_at[place.pool_id] += 1
    if place.pool_id in board.heads:
        board.room.expect(devices, board.end(run, start))
    else:
        board.heads[place.pool_id] = run.run_id
        board.reserve(run, place, devices, start)
    board.blocked.append(Blocked(run, demand, "devices", start, place))


def _wait_for_quota(run: WaitingRun, demand: Demand, board: PlanState) -> None:
    """Reserve quota for the team's blocked run, or small later runs would keep it waiting forever."""
    result = [(board.quota_from(run, place.pool_id), place) for place in demand.places]
    start, place = min(result, key=lambda entry: entry[0])
    account = (run.team_id, place.pool_id)
    board.looked_at[place.pool_id] += 1
    if account not in board.ledger.promised_from:
        board.ledger.promise(account, run.devices, start)
    board.blocked.append(Blocked(run, demand, "quota", start, place))
