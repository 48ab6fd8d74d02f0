"""Placement: devices by node and kind, and best fit on one node, on whole nodes, or evenly over a number of nodes.

A run's devices are of one kind and in one pool, on the node with the fewest sufficient free devices (best fit). If no node is
large enough and `nodes_max` allows several, the run gets whole nodes and the remainder on one more. A run with `nodes` gets
exactly that many, with an equal part of its devices on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from oppo_platform.scheduling.policy.snapshot import DevicesByNode, Node, Request, Reservation, RunningRun, Snapshot, WaitingRun

UNKNOWN = math.inf  # an unknown instant


@dataclass(slots=True, eq=False)
class NodeDevices:
    """The ready devices of one kind on one node. Every device id is in `free_at` and in at most one of `free` and `reserved`."""

    node: Node
    kind: str
    model: str
    registered: int  # in any state
    free: list[int] = field(default_factory=list)  # not reserved
    reserved: dict[int, Reservation] = field(default_factory=dict)  # free, but reserved
    vacating: set[int] = field(default_factory=set)  # held by a run that is stopping, not claimed
    free_at: dict[int, float] = field(default_factory=dict)  # expected instant
    _free_times: list[float] | None = field(default=None, init=False)

    @property
    def size(self) -> int:
        """The number of ready devices, free or held."""
        return len(self.free_at)

    @property
    def free_times(self) -> list[float]:
        """The instants of `free_at`, ascending."""
        if self._free_times is None:
            self._free_times = sorted(self.free_at.values())
        return self._free_times

    def expect(self, device_id: int, free_at: float) -> None:
        """Change when a device is expected to be free."""
        self.free_at[device_id] = free_at
        self._free_times = None


@dataclass(slots=True, eq=False)
class Place:
    """Devices of one pool and kind that a demand could use. Failed fits are cached: during a plan devices only become fewer."""

    pool_id: int
    kind: str
    groups: list[NodeDevices]
    full: bool = False
    no_gap_until: float = UNKNOWN  # a stay until this instant or longer does not fit before the reservations


@dataclass(slots=True, eq=False)
class Demand:
    """The common part of equal requests, computed once per plan: sizes, and the places that are large enough when free."""

    devices: int
    nodes_max: int
    nodes: int | None
    places: list[Place]


Amount = Callable[[NodeDevices], int]  # the usable devices of a group
Selection = list[tuple[NodeDevices, int]]  # groups with a number of devices each


def best_fit(groups: Iterable[NodeDevices], devices: int, amount: Amount) -> NodeDevices | None:
    """The group with the smallest sufficient amount."""
    enough = ((offered, group.node.node_id, group) for group in groups if (offered := amount(group)) >= devices)
    best = min(enough, key=lambda entry: entry[:2], default=None)
    return None if best is None else best[2]


def select_devices(groups: Sequence[NodeDevices], request: Demand | WaitingRun, amount: Amount) -> Selection | None:
    """Devices by the rules of this module; None if the request does not fit."""
    if request.nodes is not None:
        return select_even(groups, request.devices // request.nodes, request.nodes, amount)
    return select_whole_nodes(groups, request.devices, request.nodes_max, amount)


def select_even(groups: Sequence[NodeDevices], part: int, nodes: int, amount: Amount) -> Selection | None:
    """`part` devices on each of exactly `nodes` nodes, by best fit; None if they do not fit."""
    enough = sorted((offered, b.node.node_id) for b in groups if (offered := amount(b)) >= part)
    chosen = {node_id for _, node_id in enough[:nodes]}
    return [(b, part) for b in groups if b.node.node_id in chosen] if len(chosen) == nodes else None


def select_whole_nodes(groups: Sequence[NodeDevices], devices: int, nodes_max: int, amount: Amount) -> Selection | None:
    """Devices on one node, else on whole nodes and the remainder on one more; None if they do not fit."""
    chosen: Selection = []
    left, rest = list(groups), devices
    while len(chosen) < nodes_max:
        last = best_fit(left, rest, amount)
        if last is not None:
            return [*chosen, (last, rest)]
        whole = max((b for b in left if amount(b) == b.size > 0), key=lambda b: (b.size, -b.node.node_id), default=None)
        if whole is None:
            return None
        chosen.append((whole, whole.size))
        left.remove(whole)
        rest -= whole.size
    return None


class ClusterDevices:
    """The cluster's devices, and the changes that a plan makes to them."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        """Read the ready devices, their holders, and the expected ends."""
        self.now = now
        self._pool_names = {pool.pool_id: pool.name for pool in snapshot.pools}
        self._stop_s = snapshot.settings.stop_s
        self.nodes = sorted(snapshot.nodes, key=lambda node: node.node_id)
        self.low_on_disk = [node for node in self.nodes if node.low_disk and node.connected and not node.draining]
        self.groups: dict[tuple[int, str], NodeDevices] = {}
        self.group_of: dict[int, NodeDevices] = {}
        self._demands: dict[Request, Demand] = {}
        self.free_in: dict[int, int] = {pool.pool_id: 0 for pool in snapshot.pools}
        self.pools_with_reserved: set[int] = set()  # pools with a device that is free, but reserved
        self.claimed: set[int] = set()  # held devices, reserved for when they become free
        holders = {device: run for run in snapshot.running for ids in run.devices.values() for device in ids}
        for node in self.nodes:
            self._read(node, holders)

    def _read(self, node: Node, holders: dict[int, RunningRun]) -> None:
        for device in sorted(node.devices, key=lambda d: d.device_id):
            key = (node.node_id, device.kind)
            group = self.groups.setdefault(key, NodeDevices(node, device.kind, device.model, 0))
            group.registered += 1
            if device.state != "ready":
                continue
            self.group_of[device.device_id] = group
            holder = holders.get(device.device_id)
            if holder is None and device.held_by is None:
                group.free.append(device.device_id)
                group.free_at[device.device_id] = self.now
                self.free_in[node.pool_id] = self.free_in.get(node.pool_id, 0) + node.schedulable
                continue
            group.free_at[device.device_id] = UNKNOWN if holder is None else self.end(holder)
            if holder is not None and holder.stopping:
                group.vacating.add(device.device_id)

    def end(self, run: RunningRun) -> float:
        """The instant at which a running run is expected to release its devices."""
        if run.stopping:
            return self.now + self._stop_s
        end = UNKNOWN if run.expected_end is None else run.expected_end
        if run.backfill is not None and run.backfill.until > self.now:
            end = min(end, run.backfill.until)
        return max(self.now, end)

    def demand(self, run: WaitingRun) -> Demand:
        """The run's demand, shared by equal requests."""
        demand = self._demands.get(run.request)
        if demand is None:
            demand = self._demands[run.request] = Demand(run.devices, run.nodes_max, run.nodes, list(self._places(run)))
        return demand

    def _places(self, run: WaitingRun) -> Iterator[Place]:
        by_pool_and_kind: dict[tuple[bool, int, str], list[NodeDevices]] = {}
        for group in self.groups.values():
            if group.node.schedulable and group.size and may_use(run, group):
                by_pool_and_kind.setdefault((group.kind != "cuda", group.node.pool_id, group.kind), []).append(group)
        for (_, pool_id, kind), groups in sorted(by_pool_and_kind.items()):
            if select_devices(groups, run, lambda b: b.size):
                yield Place(pool_id, kind, groups)

    def fit(self, demand: Demand, place: Place) -> DevicesByNode | None:
        """Free devices that are not reserved, or None."""
        if place.full or self.free_in.get(place.pool_id, 0) < demand.devices:
            return None
        chosen = select_devices(place.groups, demand, lambda b: len(b.free))
        place.full = chosen is None
        return None if chosen is None else {b.node.node_id: tuple(b.free[:count]) for b, count in chosen}

    def may_fit_around(self, place: Place, until: float) -> bool:
        """Whether a stay until then may fit before reservations, as far as earlier searches show."""
        return until < place.no_gap_until and place.pool_id in self.pools_with_reserved

    def fit_around(self, demand: Demand, place: Place, until: float) -> DevicesByNode | None:
        """Free devices, including those reserved from `until` or later; None if they do not fit."""
        if not self.may_fit_around(place, until):
            return None
        usable = {
            b: [*b.free, *(d for d, reserved in b.reserved.items() if reserved.start is not None and until <= reserved.start)]
            for b in place.groups
        }
        chosen = select_devices(place.groups, demand, lambda b: len(usable[b]))
        if chosen is None:
            place.no_gap_until = until
            return None
        return {b.node.node_id: tuple(usable[b][:count]) for b, count in chosen}

    def pool_name(self, pool_id: int) -> str:
        """The pool's name, or its id."""
        return self._pool_names.get(pool_id, str(pool_id))

    def take(self, devices: DevicesByNode, until: float) -> None:
        """Allocate these free devices until an instant."""
        for device_id in (d for ids in devices.values() for d in ids):
            group = self.group_of[device_id]
            if group.reserved.pop(device_id, None) is None:
                group.free.remove(device_id)
                self.free_in[group.node.pool_id] -= 1
            group.expect(device_id, until)

    def reserve_devices(self, reservation: Reservation, until: float) -> None:
        """Reserve free devices, and claim held ones for when they become free."""
        for device_id in (d for ids in reservation.devices.values() for d in ids):
            group = self.group_of[device_id]
            if device_id in group.free:
                group.free.remove(device_id)
                self.free_in[group.node.pool_id] -= 1
                group.reserved[device_id] = reservation
                self.pools_with_reserved.add(group.node.pool_id)
            else:
                self.claimed.add(device_id)
            group.vacating.discard(device_id)
        self.expect(reservation.devices, until)

    def expect(self, devices: DevicesByNode, until: float) -> None:
        """Count these devices as used until an instant, for the estimates of later runs."""
        for device_id in (d for ids in devices.values() for d in ids):
            self.group_of[device_id].expect(device_id, until)


def may_use(run: WaitingRun, group: NodeDevices) -> bool:
    """Whether kind, catalogue, checkpoint and retry rules allow the run on these devices."""
    node = group.node
    return (
        run.kind in ("any", group.kind)
        and run.needs <= node.offers
        and (run.home is None or run.home[0] == node.node_id)
        and node.node_id not in run.excluded_nodes
    )
