"""Baselines of the policy: FIFO, and FIFO with EASY backfill. Same gang rules; no quotas, shares or preemption.

Both are planners like `policy.plan`. They consider runs in the order of submission and place them as the policy does: best fit on
one node, otherwise whole nodes.
"""

from __future__ import annotations

from bisect import bisect_left

from oppo_platform.scheduling.policy import Backfill, Decisions, Placement, Reservation, Snapshot, WaitingRun
from oppo_platform.scheduling.policy.placement import UNKNOWN, ClusterDevices, Place, Selection, select_devices
from oppo_platform.scheduling.policy.snapshot import DevicesByNode


def fifo(snapshot: Snapshot, now: float) -> Decisions:
    """First in, first out: a run that does not fit blocks all runs behind it."""
    cluster, placements = ClusterDevices(snapshot, now), list[Placement]()
    for run in _in_order(snapshot):
        placed = _start(run, cluster, now)
        if placed is None:
            break
        placements.append(placed)
    return Decisions(placements=tuple(placements))


def easy(snapshot: Snapshot, now: float) -> Decisions:
    """FIFO with EASY backfill: devices are reserved for the first run that does not fit; later runs may start if they do not
    delay it.

        A later run gets free devices without a reservation, or reserved ones if its estimate ends before they are needed. A
        run without
        an estimate gets no reserved device. A wrong estimate delays the head: nothing is stopped for it.
    """
    cluster, placements, queue = ClusterDevices(snapshot, now), list[Placement](), _in_order(snapshot)
    while queue:
        placed = _start(queue[0], cluster, now)
        if placed is None:
            break
        placements.append(placed)
        del queue[0]
    if not queue:
        return Decisions(placements=tuple(placements))
    reservation = _reserve(queue[0], cluster)
    for run in queue[1:]:
        placed = _start(run, cluster, now) or _start_around(run, cluster, now, reservation)
        if placed is not None:
            placements.append(placed)
    return Decisions(placements=tuple(placements), reservations=(reservation,))


def _in_order(snapshot: Snapshot) -> list[WaitingRun]:
    return sorted(snapshot.waiting, key=lambda run: (run.submitted_at, run.run_id))


def _start(run: WaitingRun, cluster: ClusterDevices, now: float) -> Placement | None:
    demand = cluster.demand(run)
    for place in demand.places:
        devices = cluster.fit(demand, place)
        if devices is not None:
            cluster.take(devices, _end(run, now))
            return Placement(run.run_id, place.pool_id, devices)
    return None


def _start_around(run: WaitingRun, cluster: ClusterDevices, now: float, head: Reservation) -> Placement | None:
    """Place a run on devices reserved for the head, if its estimate ends before they are needed."""
    demand, until = cluster.demand(run), _end(run, now)
    if until == UNKNOWN or head.start is None:
        return None
    for place in demand.places:
        devices = cluster.fit_around(demand, place, until)
        if devices is not None:
            cluster.take(devices, until)
            return Placement(run.run_id, place.pool_id, devices, Backfill(head.run_id, head.start))
    return None


def _end(run: WaitingRun, now: float) -> float:
    return UNKNOWN if run.estimate_s is None else now + run.estimate_s


def _reserve(run: WaitingRun, cluster: ClusterDevices) -> Reservation:
    """Reserve the devices on which the run can start first, by the estimates of the running runs."""
    found = [(*_earliest(run, place), place.pool_id) for place in cluster.demand(run).places]
    start, devices, pool_id = min(found, key=lambda entry: (entry[0], entry[2]))
    reservation = Reservation(run.run_id, pool_id, devices, None if start == UNKNOWN else start)
    cluster.reserve_devices(reservation, UNKNOWN)
    return reservation


def _earliest(run: WaitingRun, place: Place) -> tuple[float, DevicesByNode]:
    """The earliest time at which enough devices are expected to be free, and these devices."""
    instants = sorted({instant for each in place.groups for instant in each.free_at.values()})
    first = bisect_left(instants, True, key=lambda instant: _select_at(run, place, instant) is not None)
    chosen = _select_at(run, place, instants[first])
    assert chosen is not None, "a place is one that could hold the run when all of it is free"
    return instants[first], {each.node.node_id: _first_free(each.free_at, count) for each, count in chosen}


def _select_at(run: WaitingRun, place: Place, instant: float) -> Selection | None:
    return select_devices(place.groups, run, lambda b: sum(free <= instant for free in b.free_at.values()))


def _first_free(free_at: dict[int, float], count: int) -> tuple[int, ...]:
    return tuple(sorted(free_at, key=lambda device_id: (free_at[device_id], device_id))[:count])
