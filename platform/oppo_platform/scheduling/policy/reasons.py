"""Reasons of blocked runs as sentences, from the state at the end of a plan.

A reason names runs of the run's own team only: another team's do not exist for its reader. Codes: docs/scheduling.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from oppo_platform.scheduling.policy.feasibility import low_on_disk, names_of
from oppo_platform.scheduling.policy.placement import UNKNOWN, NodeDevices, Place, cut, whole_cut
from oppo_platform.scheduling.policy.plan_state import Blocked, PlanState
from oppo_platform.scheduling.policy.snapshot import Reason, RunningRun, WaitingRun
from oppo_platform.scheduling.policy.text import describe_request, nodes_allowed, runs


def explain(board: PlanState) -> dict[int, Reason]:
    """Reasons of all blocked runs by run id. Runs beyond the lookahead with the same request share one."""
    shared: dict[tuple[int, int, str, bool], Reason] = {}
    reasons: dict[int, Reason] = {}
    for blocked in board.blocked:
        if blocked.victims or blocked.start != UNKNOWN or blocked.run.run_id in board.awaited:
            reasons[blocked.run.run_id] = _reason(blocked, board)
            continue
        key = (blocked.run.team_id, id(blocked.demand), blocked.cause, blocked.run.estimate_s is None)
        if key not in shared:
            shared[key] = _reason(blocked, board)
        reasons[blocked.run.run_id] = shared[key]
    return reasons


def _reason(blocked: Blocked, board: PlanState) -> Reason:
    if blocked.cause == "preempting":
        return _preempting(blocked)
    victims = board.awaited.get(blocked.run.run_id, ())
    from_when = max(map(board.protected_until, victims), default=UNKNOWN) + board.snapshot.settings.stop_s
    if from_when < blocked.start:
        return _protected(blocked.run, victims, from_when)
    if blocked.cause == "quota":
        return _quota(blocked, board)
    return _devices(blocked, board)


def _start(blocked: Blocked) -> float | None:
    return None if blocked.start == UNKNOWN else blocked.start


def _preempting(blocked: Blocked) -> Reason:
    text = _victims(blocked.run.team_id, blocked.victims)
    return Reason("preempting", text, {"stopping": len(blocked.victims)}, _start(blocked))


def _victims(team_id: int, victims: Sequence[RunningRun]) -> str:
    if not victims:
        return "Waits for stopping runs to release their devices."
    return f"{_named(team_id, victims)} {'is' if len(victims) == 1 else 'are'} being preempted for this run."


def _named(team_id: int, victims: Sequence[RunningRun]) -> str:
    """Names of runs as the beginning of a sentence; other teams' runs are counted."""
    own = [victim.run_id for victim in victims if victim.team_id == team_id]
    others = len(victims) - len(own)
    count = f"{others} run{'s' if others > 1 else ''} of {'another team' if others == 1 else 'other teams'}"
    return " and ".join([*([runs(own)] if own else []), *([count] if others else [])])


def _protected(run: WaitingRun, victims: Sequence[RunningRun], start: float) -> Reason:
    they, devices = ("it has", "its") if len(victims) == 1 else ("they have", "their")
    text = f"{_named(run.team_id, victims)} can be preempted once {they} had {devices} minimum runtime."
    return Reason("protected", text, {"protected": len(victims)}, start, "Frees up when running jobs end.")


def _quota(blocked: Blocked, board: PlanState) -> Reason:
    run, place = blocked.run, blocked.place or blocked.demand.places[0]
    account = (run.team_id, place.pool_id)
    quota, used = board.ledger.quota(account), board.ledger.used[account]
    team, pool = board.team_name(run.team_id), board.room.pool_name(place.pool_id)
    cap = "it cannot borrow" if quota.borrow_cap == 0 else f"its borrow limit is {quota.borrow_cap}"
    if quota.limit is not None and used + run.devices <= quota.limit:
        text = f"The rest of team {team}'s quota on pool {pool} is reserved for a run of the team ahead of it."
    elif used == quota.nominal:
        text = f"Team {team} is at its quota of {quota.nominal} on pool {pool}; {cap}."
    else:
        text = f"Team {team} uses {used} on pool {pool}; its quota is {quota.nominal}, and {cap}."
    detail = {"pool": place.pool_id, "used": used, "quota": quota.nominal, "borrow_cap": quota.borrow_cap, "devices": run.devices}
    return Reason(
        "quota", text, detail, _start(blocked), "Frees up when runs of the team end, or with a larger quota or borrow limit."
    )


def _devices(blocked: Blocked, board: PlanState) -> Reason:
    """Why there is no room, judged on the places that the quota does not exclude."""
    run, demand = blocked.run, blocked.demand
    short = [place for place in demand.places if cut(place.bins, run, lambda b: len(b.free)) is None]
    if not short:
        return _quota(blocked, board)
    bins = [each for place in short for each in place.bins]
    keepers = [reservation.run_id for each in bins for reservation in each.reserved.values() if reservation.run_id != run.run_id]
    free = sum(len(each.free) + len(each.reserved) for each in bins)
    wanted = describe_request(run, _model(bins))
    detail = {"devices": run.devices, "free": free, "kept": len(keepers), "usable": sum(each.size for each in bins)}
    if keepers and any(cut(place.bins, run, lambda b: len(b.free) + len(b.reserved)) for place in short):
        own = [run_id for run_id in keepers if board.team_of.get(run_id) == run.team_id]
        keeper = f"run {own[0]}" if own else "a run of another team"
        text = f"Waits for {wanted}: enough are free, but reserved for {keeper} ahead of it."
        return Reason("reserved", text, detail, _start(blocked), _shorter(blocked))
    text = _scarce(run, bins, free, wanted) + _low_disk_nodes(run, board)
    return Reason("devices", text, detail, _start(blocked), _smaller_request(run, short))


def _low_disk_nodes(run: WaitingRun, board: PlanState) -> str:
    """Nodes that are excluded because of low disk space."""
    full = low_on_disk(run, board.room)
    return f" {names_of(full)} accept{'s' * (len(full) == 1)} no new runs: low on disk." if full else ""


def _model(bins: Sequence[NodeDevices]) -> str:
    """The GPU's model if all suitable ones have one."""
    models = {each.model if each.kind == "cuda" else "" for each in bins}
    return models.pop() if len(models) == 1 else ""


def _scarce(run: WaitingRun, bins: Sequence[NodeDevices], free: int, wanted: str) -> str:
    if free == 0:
        usable = sum(each.size for each in bins)
        used = "the only suitable one is" if usable == 1 else f"all {usable} suitable ones are"
        return f"Waits for {wanted}: {used} in use."
    nodes = sum(bool(each.free or each.reserved) for each in bins)
    spread = f", spread over {nodes} nodes" if nodes > 1 else ""
    return f"Waits for {wanted} on {nodes_allowed(run)}: {free} {'is' if free == 1 else 'are'} free{spread}."


def _smaller_request(run: WaitingRun, places: Sequence[Place]) -> str:
    """A smaller request that would fit now into free unreserved devices."""

    def open_to_it(each: NodeDevices) -> int:
        return len(each.free) + sum(reserved.run_id == run.run_id for reserved in each.reserved.values())

    if run.nodes is not None:
        return "Frees up when running jobs end or nodes are added."
    for place in places:
        chosen = whole_cut(place.bins, run.devices, len(place.bins), open_to_it)
        if chosen and len(chosen) > run.nodes_max:
            return f"Could start now on {len(chosen)} nodes."
    most = max((open_to_it(each) for place in places for each in place.bins), default=0)
    if most:
        return f"Could start now with {most} device{'s' if most > 1 else ''}."
    return "Frees up when running jobs end or nodes are added."


def _shorter(blocked: Blocked) -> str:
    if blocked.run.estimate_s is None:
        return "Set a max runtime so that it can be backfilled."
    return "Set a shorter max runtime so that it can be backfilled."
