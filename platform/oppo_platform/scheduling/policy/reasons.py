"""Waiting reasons of blocked runs, from the state at the end of a plan. Codes: docs/scheduling.md.

A reason names only runs of the run's own team; runs of other teams are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oppo_platform.scheduling.policy.blocked_runs import blocked_behind
from oppo_platform.scheduling.policy.feasibility import describe_nodes, describe_request, low_on_disk, node_names
from oppo_platform.scheduling.policy.placement import UNKNOWN, Demand, NodeDevices, Place, select_devices, select_whole_nodes
from oppo_platform.scheduling.policy.plan_state import Blocked, PlanState
from oppo_platform.scheduling.policy.snapshot import Reason, Request, RunningRun, WaitingRun


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why the devices do not suffice for a demand, in its places where quota is not the only limit (`short`).

    `reserved_for`: the run of each reserved device there. `fits_reserved`: whether they would suffice with these.
    """

    short: list[Place]
    groups: list[NodeDevices]
    reserved_for: list[int]
    free: int
    usable: int
    request: str
    fits_reserved: bool
    smaller: str  # a request that would fit now, for runs without a reservation


def explain(state: PlanState) -> dict[int, Reason]:
    """The reasons of all blocked runs, by run id. Equal requests without an estimate or a reservation share one."""
    shortages: dict[Demand, Shortage] = {}
    shared: dict[tuple[int, Demand, str, bool], Reason] = {}
    reserving = {reservation.run_id for reservation in state.reservations}
    reasons: dict[int, Reason] = {}
    for blocked in state.blocked:
        own = blocked.run.run_id in reserving or blocked.run.run_id in state.protected_victims
        if own or blocked.victims or blocked.start != UNKNOWN:
            reasons[blocked.run.run_id] = _reason(blocked, state, shortages)
            continue
        key = (blocked.run.team_id, blocked.demand, blocked.cause, blocked.run.estimate_s is None)
        if key not in shared:
            shared[key] = _reason(blocked, state, shortages)
        reasons[blocked.run.run_id] = shared[key]
    of_rest: dict[tuple[int, Request, bool], Reason] = {}
    for run in state.rest:  # thousands: a look at the quota for each request of a team only
        request = (run.team_id, run.request, run.estimate_s is None)
        if request not in of_rest:
            blocked = blocked_behind(run, state.cluster.demand(run), state)
            known = shared.get((run.team_id, blocked.demand, blocked.cause, request[2]))
            of_rest[request] = known if known is not None else _reason(blocked, state, shortages)
        reasons[run.run_id] = of_rest[request]
    return reasons


def _reason(blocked: Blocked, state: PlanState, shortages: dict[Demand, Shortage]) -> Reason:
    if blocked.cause == "preempting":
        text = "Waits for stopping runs to release their devices."
        if victims := blocked.victims:
            verb = "is" if len(victims) == 1 else "are"
            text = f"{_named(blocked.run.team_id, victims)} {verb} being preempted for this run."
        return Reason("preempting", text, {"stopping": len(victims)}, blocked.estimated_start)
    victims = state.protected_victims.get(blocked.run.run_id, ())
    from_when = max(map(state.protected_until, victims), default=UNKNOWN) + state.snapshot.settings.stop_s
    if from_when < blocked.start:
        return _protected(blocked.run, victims, from_when)
    if blocked.cause == "quota":
        return _quota(blocked, state)
    if blocked.demand not in shortages:
        shortages[blocked.demand] = _shortage_of(blocked.run, blocked.demand)
    return _devices(blocked, state, shortages[blocked.demand])


def _named(team_id: int, victims: Sequence[RunningRun]) -> str:
    """`Runs 4 and 7 and 1 run of another team`, at the beginning of a sentence."""
    own = [str(victim.run_id) for victim in victims if victim.team_id == team_id]
    others = len(victims) - len(own)
    parts = []
    if own:
        parts.append(f"Run {own[0]}" if len(own) == 1 else f"Runs {', '.join(own[:-1])} and {own[-1]}")
    if others:
        parts.append("1 run of another team" if others == 1 else f"{others} runs of other teams")
    return " and ".join(parts)


def _protected(run: WaitingRun, victims: Sequence[RunningRun], start: float) -> Reason:
    they, devices = ("it has", "its") if len(victims) == 1 else ("they have", "their")
    text = f"{_named(run.team_id, victims)} can be preempted once {they} had {devices} minimum runtime."
    return Reason("protected", text, {"protected": len(victims)}, start, "Devices free up when running runs end.")


def _quota(blocked: Blocked, state: PlanState) -> Reason:
    run, place = blocked.run, blocked.place or blocked.demand.places[0]
    account = (run.team_id, place.pool_id)
    quota, used = state.ledger.quota(account), state.ledger.used[account]
    team, pool = state.team_name(run.team_id), state.cluster.pool_name(place.pool_id)
    cap = "it cannot borrow" if quota.borrow_cap == 0 else f"its borrow limit is {quota.borrow_cap}"
    if quota.limit is not None and used + run.devices <= quota.limit:
        text = f"The rest of team {team}'s quota on pool {pool} is reserved for a run of the team ahead of it."
    elif used == quota.nominal:
        text = f"Team {team} is at its quota of {quota.nominal} on pool {pool}; {cap}."
    else:
        text = f"Team {team} uses {used} on pool {pool}; its quota is {quota.nominal}, and {cap}."
    detail = {"pool": place.pool_id, "used": used, "quota": quota.nominal, "borrow_cap": quota.borrow_cap, "devices": run.devices}
    hint = "Quota frees up when runs of the team end, or with a larger quota or borrow limit."
    return Reason("quota", text, detail, blocked.estimated_start, hint)


def _shortage_of(run: WaitingRun, demand: Demand) -> Shortage:
    """`run` is any of the runs with this demand."""
    short = [place for place in demand.places if select_devices(place.groups, run, lambda b: len(b.free)) is None]
    groups = [group for place in short for group in place.groups]
    models = {group.model if group.kind == "cuda" else "" for group in groups}
    return Shortage(
        short, groups,
        reserved_for=[reserved.run_id for group in groups for reserved in group.reserved.values()],
        free=sum(len(group.free) + len(group.reserved) for group in groups),
        usable=sum(group.size for group in groups),
        request=describe_request(run, models.pop() if len(models) == 1 else ""),
        fits_reserved=any(select_devices(place.groups, run, lambda b: len(b.free) + len(b.reserved)) for place in short),
        smaller=_smaller_request(run, short, lambda b: len(b.free)),
    )  # fmt: skip


def _devices(blocked: Blocked, state: PlanState, shortage: Shortage) -> Reason:
    """The shortage of devices, in the places where quota is not the only limit."""
    run = blocked.run
    if not shortage.short:
        return _quota(blocked, state)
    reserved_for, request = [run_id for run_id in shortage.reserved_for if run_id != run.run_id], shortage.request
    detail = {"devices": run.devices, "free": shortage.free, "kept": len(reserved_for), "usable": shortage.usable}
    if reserved_for and shortage.fits_reserved:
        own = [run_id for run_id in reserved_for if state.team_of.get(run_id) == run.team_id]
        ahead = f"run {own[0]}" if own else "a run of another team"
        text = f"Waits for {request}: enough are free, but reserved for {ahead} ahead of it."
        hint = f"Set a {'' if run.estimate_s is None else 'shorter '}max runtime so that it can be backfilled."
        return Reason("reserved", text, detail, blocked.estimated_start, hint)
    text = _shortage_text(run, shortage)
    if full := low_on_disk(run, state.cluster):
        text += f" {node_names(full)} accept{'s' * (len(full) == 1)} no new runs: low on disk."
    smaller = shortage.smaller
    if run.run_id in shortage.reserved_for:
        kept = Counter(b for b in shortage.groups for reserved in b.reserved.values() if reserved.run_id == run.run_id)
        smaller = _smaller_request(run, shortage.short, lambda b: len(b.free) + kept[b])
    return Reason("devices", text, detail, blocked.estimated_start, smaller)


def _shortage_text(run: WaitingRun, shortage: Shortage) -> str:
    free, usable, request = shortage.free, shortage.usable, shortage.request
    if free == 0:
        used = "the only suitable one is" if usable == 1 else f"all {usable} suitable ones are"
        return f"Waits for {request}: {used} in use."
    nodes = sum(bool(group.free or group.reserved) for group in shortage.groups)
    spread = f", spread over {nodes} nodes" if nodes > 1 else ""
    return f"Waits for {request} on {describe_nodes(run)}: {free} {'is' if free == 1 else 'are'} free{spread}."


def _smaller_request(run: WaitingRun, places: Sequence[Place], usable: Callable[[NodeDevices], int]) -> str:
    """A request that would fit now. `usable`: a node's devices that are free and not reserved for other runs."""
    most = 0 if run.nodes is not None else max((usable(group) for place in places for group in place.groups), default=0)
    if not most:
        return "Devices free up when running runs end or nodes are added."
    for place in places:
        chosen = select_whole_nodes(place.groups, run.devices, len(place.groups), usable)
        if chosen and len(chosen) > run.nodes_max:
            return f"Could start now on {len(chosen)} nodes."
    return f"Could start now with {most} device{'s' if most > 1 else ''}."
