"""Reservations for blocked runs, and backfill in front of them.

A blocked run's start is estimated from when devices become free, with those of earlier runs in use for their expected time (list
scheduling). The first blocked run of a pool, its head, gets a reservation. Other runs may use a reserved device only if they
surely leave it in time: by an enforced `max_runtime`, or, if preemptible, by a measured estimate; a run that is still there at
the
reservation is preempted.
"""

from __future__ import annotations

from oppo_platform.scheduling.policy.placement import UNKNOWN, Demand, NodeDevices, Place
from oppo_platform.scheduling.policy.plan_state import PlanState
from oppo_platform.scheduling.policy.snapshot import Backfill, DevicesByNode, PolicySettings, WaitingRun


def bound_s(run: WaitingRun, settings: PolicySettings) -> float:
    """Seconds after which the run has surely left its devices; `UNKNOWN` without a bound.

    A run bounded by preemption is not stopped before its minimum run time, however short its estimate.
    """
    enforced = UNKNOWN if run.max_runtime_s is None else run.max_runtime_s
    if not run.preemptible or run.estimate_s is None:
        return enforced
    return min(enforced, max(run.estimate_s, settings.protection_s(run.preempted)))


def backfill(run: WaitingRun, demand: Demand, board: PlanState) -> bool:
    """Start the run on devices with later reservations, if it surely leaves in time."""
    until = board.now + bound_s(run, board.snapshot.settings)
    if until == UNKNOWN:
        return False
    for place in demand.places:
        if not board.ledger.fits_until((run.team_id, place.pool_id), run.devices, until):
            continue
        devices = board.room.fit_around(demand, place, until)
        if devices is not None:
            board.place(run, place, devices, _condition(devices, place, board))
            return True
    return False


def _condition(devices: DevicesByNode, place: Place, board: PlanState) -> Backfill | None:
    """The run to make way for, and when: the earliest reservation on its devices."""
    reserved = [b.reserved[d] for b in place.bins for d in devices.get(b.node.node_id, ()) if d in b.reserved]
    first = min((r for r in reserved if r.start is not None), key=lambda r: (r.start, r.run_id), default=None)
    return None if first is None or first.start is None else Backfill(first.run_id, first.start)


def earliest(demand: Demand, place: Place, board: PlanState, preferred: frozenset[int]) -> tuple[float, DevicesByNode]:
    """Earliest estimated start of the run there, and its devices; `preferred`: its devices in the last plan."""
    if demand.nodes is not None:
        return _even_nodes(demand.devices // demand.nodes, demand.nodes, place, preferred)
    single = [
        (*_opening(b, demand.devices), sum(d not in preferred for d in b.free_at), b.node.node_id, b)
        for b in place.bins
        if b.size >= demand.devices
    ]
    if single:
        start, _, _, _, best = min(single, key=lambda entry: entry[:4])
        return start, {best.node.node_id: _first_free(best, demand.devices)}
    return _whole_nodes(demand, place)


def _even_nodes(part: int, nodes: int, place: Place, preferred: frozenset[int]) -> tuple[float, DevicesByNode]:
    """The same for an equal part on each of several nodes: those that open first."""
    able = [
        (*_opening(b, part), sum(d not in preferred for d in b.free_at), b.node.node_id, b) for b in place.bins if b.size >= part
    ]
    first = sorted(able, key=lambda entry: entry[:4])[:nodes]
    return max(entry[0] for entry in first), {b.node.node_id: _first_free(b, part) for *_, b in first}


def _opening(each: NodeDevices, devices: int) -> tuple[float, int]:
    """When so many of its devices are free, and for how many of them that is unknown."""
    times = sorted(each.free_at.values())[:devices]
    return times[-1], sum(time == UNKNOWN for time in times)


def _first_free(each: NodeDevices, devices: int) -> tuple[int, ...]:
    return tuple(sorted(each.free_at, key=lambda device_id: (each.free_at[device_id], device_id))[:devices])


def _whole_nodes(demand: Demand, place: Place) -> tuple[float, DevicesByNode]:
    def whole(each: NodeDevices) -> tuple[float, int, int, int]:
        return *_opening(each, each.size), -each.size, each.node.node_id

    for bins in (sorted(place.bins, key=whole), sorted(place.bins, key=lambda b: (-b.size, whole(b)))):
        chosen, rest, start = dict[int, tuple[int, ...]](), demand.devices, 0.0
        for each in bins[: demand.nodes_max]:
            count = min(rest, each.size)
            if count:
                chosen[each.node.node_id] = _first_free(each, count)
                start, rest = max(start, _opening(each, count)[0]), rest - count
        if rest == 0:
            return start, chosen
    raise AssertionError("a place is one that could hold the demand when all of it is free")
