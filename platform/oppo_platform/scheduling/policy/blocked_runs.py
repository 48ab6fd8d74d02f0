"""Runs that cannot start: preemption for them, or a wait with a reservation, an estimate, or neither."""

from __future__ import annotations

from collections.abc import Iterable

from oppo_platform.scheduling.policy.backfill import earliest, max_stay_s, may_start
from oppo_platform.scheduling.policy.placement import UNKNOWN, Demand, Place
from oppo_platform.scheduling.policy.plan_state import Blocked, PlanState
from oppo_platform.scheduling.policy.preemption import Cause, find_victims
from oppo_platform.scheduling.policy.snapshot import Request, WaitingRun

STOP_TEXT = {
    Cause.BACKFILL: "It was backfilled ahead of a blocked run, and that run can start now.",
    Cause.RECLAIM: "Its team borrows devices beyond its quota, and another team reclaims them.",
    Cause.PRIORITY: "A run of the team with a higher priority needs its devices.",
}


def preempt_for(run: WaitingRun, demand: Demand, state: PlanState) -> bool:
    """Preempt running runs, or wait for stopping ones, and reserve their devices for the run; False if that is impossible."""
    key = (run.team_id, id(demand), run.priority)
    if key in state.unpreemptable or not _within_lookahead(demand, state):
        return False
    clearance = find_victims(run, demand, state)
    if clearance is None:
        state.unpreemptable.add(key)
        _note_protected_victims(run, demand, state)
        return False
    ready = state.now + state.snapshot.settings.stop_s
    if clearance.victims and min((earliest(demand, place)[0] for place in state.options(run)), default=UNKNOWN) <= ready:
        return False  # it starts as early without preemption
    for victim in clearance.victims:
        state.stop(victim.run, run, victim.cause.name.lower(), STOP_TEXT[victim.cause])
        for group, ids in victim.by_node.items():
            group.vacating.update(ids)
    cleared_before = any(r.cleared and r.run_id == run.run_id for r in state.snapshot.reservations)
    state.reserve(run, clearance.place, clearance.devices, ready, cleared=bool(clearance.victims) or cleared_before)
    state.examined[clearance.place.pool_id] += 1
    victims = tuple(victim.run for victim in clearance.victims)
    state.blocked.append(Blocked(run, demand, "preempting", ready, clearance.place, victims))
    return True


def _note_protected_victims(run: WaitingRun, demand: Demand, state: PlanState) -> None:
    """Store the runs that may be preempted for this run once their protected time has passed, for its reason."""
    if all(state.protected_until(other) <= state.now for place in demand.places for other, _ in state.running(place.pool_id)):
        return
    later = find_victims(run, demand, state, later=True)
    victims = () if later is None else tuple(victim.run for victim in later.victims)
    # The larger search may also end without a protected victim.
    if any(state.protected_until(victim) > state.now for victim in victims):
        state.protected_victims[run.run_id] = victims
        state.awaited.update(victim.run_id for victim in victims)


def _within_lookahead(demand: Demand, state: PlanState) -> bool:
    return any(state.examined[place.pool_id] < state.snapshot.settings.lookahead for place in demand.places)


def nothing_starts(runs: Iterable[WaitingRun], state: PlanState) -> bool:
    """Whether none of these runs, nor any decision about them, changes the state any more.

    True if the lookahead is used up, and no equal request, of the one with the shortest stay, fits.
    """
    shortest: dict[tuple[int, Request], tuple[float, WaitingRun]] = {}
    for run in runs:
        request, stay_s = (run.team_id, run.request), max_stay_s(run, state.snapshot.settings)
        known = shortest.get(request)
        if known is None and _within_lookahead(state.cluster.demand(run), state):
            return False
        if known is None or stay_s < known[0]:
            shortest[request] = stay_s, run
    return not any(may_start(run, state.cluster.demand(run), state, state.now + stay_s) for stay_s, run in shortest.values())


def block(run: WaitingRun, demand: Demand, state: PlanState) -> None:
    """Record why the run waits; a pool's head gets a reservation, runs within the lookahead an estimate."""
    options = state.options(run)
    if not _within_lookahead(demand, state):
        state.blocked.append(blocked_behind(run, demand, state))
    elif options:
        _wait_for_devices(run, demand, options, state)
    else:
        _wait_for_quota(run, demand, state)


def blocked_behind(run: WaitingRun, demand: Demand, state: PlanState) -> Blocked:
    """A run beyond the lookahead."""
    options = state.options(run)
    return Blocked(run, demand, "devices" if options else "quota", place=(options or demand.places)[0])


def _wait_for_devices(run: WaitingRun, demand: Demand, options: list[Place], state: PlanState) -> None:
    preferred = state.reserved_before(run)
    estimates = [(*earliest(demand, place, preferred), place) for place in options]
    start, devices, place = min(estimates, key=lambda entry: entry[0])
    state.examined[place.pool_id] += 1
    if place.pool_id in state.heads:
        state.cluster.expect(devices, state.end(run, start))
    else:
        state.heads[place.pool_id] = run.run_id
        state.reserve(run, place, devices, start)
    state.blocked.append(Blocked(run, demand, "devices", start, place))


def _wait_for_quota(run: WaitingRun, demand: Demand, state: PlanState) -> None:
    """Reserve quota for the run, so that later small runs of the team do not starve it."""
    estimates = [(state.quota_from(run, place.pool_id), place) for place in demand.places]
    start, place = min(estimates, key=lambda entry: entry[0])
    account = (run.team_id, place.pool_id)
    state.examined[place.pool_id] += 1
    if account not in state.ledger.promised_from:
        state.ledger.promise(account, run.devices, start)
    state.blocked.append(Blocked(run, demand, "quota", start, place))
