"""EASY backfill: start estimates of blocked runs, and runs that start ahead of a reservation.

A blocked run's start is estimated by list scheduling: devices of runs ahead of it count as used for their expected time. A pool's
first blocked run, its head, gets its devices reserved. Another run may use a reserved device only if it is certain to release it
in time: by an enforced `max_runtime`, or, if preemptible, by a measured estimate; at the reservation it is preempted.
"""

from __future__ import annotations

from oppo_platform.scheduling.policy.placement import UNKNOWN, Demand, NodeDevices, Place
from oppo_platform.scheduling.policy.plan_state import PlanState
from oppo_platform.scheduling.policy.snapshot import Backfill, DevicesByNode, PolicySettings, WaitingRun


def max_stay_s(run: WaitingRun, settings: PolicySettings) -> float:
    """Longest time for which the run can hold its devices, seconds; `UNKNOWN` if unlimited.

    It is `max_runtime_s`, or, if preemptible with an estimate, the longer of estimate and protected time.
    """
    enforced = UNKNOWN if run.max_runtime_s is None else run.max_runtime_s
    if not run.preemptible or run.estimate_s is None:
        return enforced
    return min(enforced, max(run.estimate_s, settings.protection_s(run.preempted)))


def backfill(run: WaitingRun, demand: Demand, state: PlanState) -> bool:
    """Start the run on reserved devices if it is certain to release them in time."""
    until = state.now + max_stay_s(run, state.snapshot.settings)
    if until == UNKNOWN:
        return False
    for place in demand.places:
        if not state.cluster.may_fit_around(place, until):
            continue
        if not state.ledger.fits_until((run.team_id, place.pool_id), run.devices, until):
            continue
        devices = state.cluster.fit_around(demand, place, until)
        if devices is not None:
            state.place(run, place, devices, _condition(devices, place, state))
            return True
    return False


def may_start(run: WaitingRun, demand: Demand, state: PlanState, until: float) -> bool:
    """Whether the run fits on free devices, or on reserved ones if it stays until then."""
    if any(state.cluster.fit(demand, place) for place in state.options(run)):
        return True
    if until == UNKNOWN:
        return False
    accounts = ((place, (run.team_id, place.pool_id)) for place in demand.places)
    within_quota = (place for place, account in accounts if state.ledger.fits_until(account, run.devices, until))
    return any(state.cluster.fit_around(demand, place, until) for place in within_quota)


def _condition(devices: DevicesByNode, place: Place, state: PlanState) -> Backfill | None:
    """The earliest reservation on the devices: the run to make way for, and when."""
    reserved = [b.reserved[d] for b in place.groups for d in devices.get(b.node.node_id, ()) if d in b.reserved]
    first = min((r for r in reserved if r.start is not None), key=lambda r: (r.start, r.run_id), default=None)
    return None if first is None or first.start is None else Backfill(first.run_id, first.start)


def earliest(demand: Demand, place: Place, preferred: frozenset[int] = frozenset()) -> tuple[float, DevicesByNode]:
    """The estimated start there and the devices; `preferred`: the run's devices in the last plan."""
    nodes = demand.nodes or 1
    part = demand.devices // nodes
    able = [
        (*_free_time(b, part), b.size - (len(b.free_at.keys() & preferred) if preferred else 0), b.node.node_id, b)
        for b in place.groups
        if b.size >= part
    ]
    if not able:
        return _earliest_whole_nodes(demand, place)
    first = sorted(able, key=lambda entry: entry[:4])[:nodes]
    return max(entry[0] for entry in first), {b.node.node_id: _first_free(b, part) for *_, b in first}


def _free_time(group: NodeDevices, devices: int) -> tuple[float, int]:
    """When this many devices are free, and how many of them are free at an unknown time."""
    times = group.free_times[:devices]
    return times[-1], times.count(UNKNOWN)


def _first_free(group: NodeDevices, devices: int) -> tuple[int, ...]:
    return tuple(sorted(group.free_at, key=lambda device_id: (group.free_at[device_id], device_id))[:devices])


def _earliest_whole_nodes(demand: Demand, place: Place) -> tuple[float, DevicesByNode]:
    def whole(group: NodeDevices) -> tuple[float, int, int, int]:
        return *_free_time(group, group.size), -group.size, group.node.node_id

    for groups in (sorted(place.groups, key=whole), sorted(place.groups, key=lambda b: (-b.size, whole(b)))):
        chosen, rest, start = dict[int, tuple[int, ...]](), demand.devices, 0.0
        for group in groups[: demand.nodes_max]:
            count = min(rest, group.size)
            if count:
                chosen[group.node.node_id] = _first_free(group, count)
                start, rest = max(start, _free_time(group, count)[0]), rest - count
        if rest == 0:
            return start, chosen
    raise AssertionError("a place can hold the demand when all of its devices are free")
