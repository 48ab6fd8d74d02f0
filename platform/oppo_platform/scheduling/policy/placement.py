"""Placement: free devices by node and kind, and the choice of a node, or of whole nodes for a gang.

A run's devices are of one kind and in one pool. It gets them on the fullest node that has enough (best fit, which preserves large
gaps); if no node is large enough and the run allows several, it gets whole nodes, and the rest on one more. A run with a fixed
number of nodes gets an equal part of its devices on each, on the fullest nodes that have enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oppo_platform.scheduling.policy.snapshot import DevicesByNode, Node, Reservation, RunningRun, Snapshot, WaitingRun

UNKNOWN = math.inf  # an unknown instant


@dataclass(slots=True, eq=False)
class NodeDevices:
    """Working devices of one kind on one node. Every device id is in `free_at` and in at most one of `free` and `reserved`."""

    node: Node
    kind: str
    model: str
    registered: int  # in any state
    free: list[int] = field(default_factory=list)  # free, not reserved
    reserved: dict[int, Reservation] = field(default_factory=dict)  # free, reserved
    soon: set[int] = field(default_factory=set)  # held by a stopping run, reserved for no other
    free_at: dict[int, float] = field(default_factory=dict)  # when it is expected to be free for the next run in the queue

    @property
    def size(self) -> int:
        """Number of working devices, free or held."""
        return len(self.free_at)


@dataclass(slots=True, eq=False)
class Place:
    """Bins of one pool and kind that a demand could use.

    A failed search is not repeated: within a plan the number of free devices only falls.
    """

    pool_id: int
    kind: str
    bins: list[NodeDevices]
    full: bool = False
    no_gap_until: float = UNKNOWN  # a run of at least this length did not fit around the reservations


@dataclass(slots=True, eq=False)
class Demand:
    """Common part of equal requests, computed once per plan: the amount, and all places that could ever hold it."""

    devices: int
    nodes_max: int
    nodes: int | None
    places: list[Place]


class Request(Protocol):
    """Number of devices and of nodes: a waiting run, or a demand."""

    @property
    def devices(self) -> int: ...
    @property
    def nodes_max(self) -> int: ...
    @property
    def nodes(self) -> int | None: ...


Cut = list[tuple[NodeDevices, int]]  # devices by bin


def best_fit(bins: Iterable[NodeDevices], devices: int, amount: Callable[[NodeDevices], int]) -> NodeDevices | None:
    """The smallest bin that is large enough; `amount` measures a bin."""
    enough = ((offered, each.node.node_id, each) for each in bins if (offered := amount(each)) >= devices)
    result = min(enough, key=lambda entry: entry[:2], default=None)
    return None if result is None else result[2]


def cut(bins: Sequence[NodeDevices], request: Request, amount: Callable[[NodeDevices], int]) -> Cut | None:
    """Devices on one node, otherwise on whole nodes and the rest on one more; None if it does not fit.

    Or on exactly the requested number of nodes.
    """
    if request.nodes is not None:
        return even_cut(bins, request.devices // request.nodes, request.nodes, amount)
    return whole_cut(bins, request.devices, request.nodes_max, amount)


def even_cut(bins: Sequence[NodeDevices], each: int, nodes: int, amount: Callable[[NodeDevices], int]) -> Cut | None:
    """An equal part on each of exactly this many nodes, the smallest that are large enough; None if it does not fit."""
    enough = sorted((offered, b.node.node_id) for b in bins if (offered := amount(b)) >= each)
    chosen = {node_id for _, node_id in enough[:nodes]}
    return [(b, each) for b in bins if b.node.node_id in chosen] if len(chosen) == nodes else None


def whole_cut(bins: Sequence[NodeDevices], devices: int, nodes_max: int, amount: Callable[[NodeDevices], int]) -> Cut | None:
    """Devices on one node, otherwise on whole nodes and the rest on one more; None if it does not fit."""
    chosen: Cut = []
    left, rest = list(bins), devices
    while len(chosen) < nodes_max:
        last = best_fit(left, rest, amount)
        if last is not None:
            return [*chosen, (last, rest)]
        if len(chosen) + 1 == nodes_max:
            return None
        whole = max((b for b in left if amount(b) == b.size > 0), key=lambda b: (b.size, -b.node.node_id), default=None)
        if whole is None:
            return None
        chosen.append((whole, whole.size))
        left.remove(whole)
        rest -= whole.size
    return None


class ClusterDevices:
    """The cluster's devices, with the changes of a plan."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        """Read the snapshot: working devices, their holders, and expected ends."""
        self.now = now
        self._pool_names = {pool.pool_id: pool.name for pool in snapshot.pools}
        self._stop_s = snapshot.settings.stop_s
        self.nodes = sorted(snapshot.nodes, key=lambda node: node.node_id)
        self.low_on_disk = [node for node in self.nodes if node.low_disk and node.connected and not node.draining]
        self.bins: dict[tuple[int, str], NodeDevices] = {}
        self._bin_of: dict[int, NodeDevices] = {}
        self._demands: dict[tuple[object, ...], Demand] = {}
        self.free_in: dict[int, int] = {pool.pool_id: 0 for pool in snapshot.pools}
        self.kept_in: set[int] = set()  # pools with a free reserved device
        self.claimed: set[int] = set()  # held now, reserved for when they become free
        holders = {device: run for run in snapshot.running for ids in run.devices.values() for device in ids}
        for node in self.nodes:
            self._read(node, holders)

    def _read(self, node: Node, holders: dict[int, RunningRun]) -> None:
        for device in sorted(node.devices, key=lambda d: d.device_id):
            key = (node.node_id, device.kind)
            each = self.bins.setdefault(key, NodeDevices(node, device.kind, device.model, 0))
            each.registered += 1
            if device.state != "ready":
                continue
            self._bin_of[device.device_id] = each
            holder = holders.get(device.device_id)
            if holder is None and device.held_by is None:
                each.free.append(device.device_id)
                each.free_at[device.device_id] = self.now
                self.free_in[node.pool_id] = self.free_in.get(node.pool_id, 0) + node.schedulable
                continue
            each.free_at[device.device_id] = UNKNOWN if holder is None else self.end(holder)
            if holder is not None and holder.stopping:
                each.soon.add(device.device_id)

    def end(self, run: RunningRun) -> float:
        """When a running run is expected to leave its devices."""
        if run.stopping:
            return self.now + self._stop_s
        end = UNKNOWN if run.expected_end is None else run.expected_end
        if run.backfill is not None and run.backfill.until > self.now:
            end = min(end, run.backfill.until)
        return max(self.now, end)

    def demand(self, run: WaitingRun) -> Demand:
        """The run's demand, shared with all runs with the same request."""
        home = None if run.home is None else run.home[0]
        key = (run.devices, run.nodes_max, run.nodes, run.kind, run.needs, run.pools, home, run.excluded_nodes)
        if key not in self._demands:
            self._demands[key] = Demand(run.devices, run.nodes_max, run.nodes, list(self._places(run)))
        return self._demands[key]

    def _places(self, run: WaitingRun) -> Iterator[Place]:
        groups: dict[tuple[bool, int, str], list[NodeDevices]] = {}
        for each in self.bins.values():
            if each.node.schedulable and each.size and may_use(run, each):
                groups.setdefault((each.kind != "cuda", each.node.pool_id, each.kind), []).append(each)
        for (_, pool_id, kind), bins in sorted(groups.items()):
            if cut(bins, run, lambda b: b.size):
                yield Place(pool_id, kind, bins)

    def fit(self, demand: Demand, place: Place) -> DevicesByNode | None:
        """Free unreserved devices, or None."""
        if place.full or self.free_in.get(place.pool_id, 0) < demand.devices:
            return None
        chosen = cut(place.bins, demand, lambda b: len(b.free))
        place.full = chosen is None
        return None if chosen is None else {b.node.node_id: tuple(b.free[:count]) for b, count in chosen}

    def fit_around(self, demand: Demand, place: Place, until: float) -> DevicesByNode | None:
        """Free devices, including those reserved for `until` or later."""
        if until >= place.no_gap_until or place.pool_id not in self.kept_in:
            return None
        open_to = {
            b: [*b.free, *(d for d, reserved in b.reserved.items() if reserved.start is not None and until <= reserved.start)]
            for b in place.bins
        }
        chosen = cut(place.bins, demand, lambda b: len(open_to[b]))
        if chosen is None:
            place.no_gap_until = until
            return None
        return {b.node.node_id: tuple(open_to[b][:count]) for b, count in chosen}

    def pool_name(self, pool_id: int) -> str:
        """The pool's name, for people."""
        return self._pool_names.get(pool_id, str(pool_id))

    def node_devices(self, device_id: int) -> NodeDevices | None:
        """The bin of a working device, or None."""
        return self._bin_of.get(device_id)

    def take(self, devices: DevicesByNode, until: float) -> list[Reservation]:
        """Assign these free devices until an instant; returns the reservations on them."""
        crossed = []
        for device_id in (d for ids in devices.values() for d in ids):
            each = self._bin_of[device_id]
            if device_id in each.reserved:
                crossed.append(each.reserved.pop(device_id))
            else:
                each.free.remove(device_id)
                self.free_in[each.node.pool_id] -= 1
            each.free_at[device_id] = until
        return crossed

    def keep(self, reservation: Reservation, until: float) -> None:
        """Reserve devices: free ones are not available to later runs, held ones are reserved for when they become free."""
        for device_id in (d for ids in reservation.devices.values() for d in ids):
            each = self._bin_of[device_id]
            if device_id in each.free:
                each.free.remove(device_id)
                self.free_in[each.node.pool_id] -= 1
                each.reserved[device_id] = reservation
                self.kept_in.add(each.node.pool_id)
            else:
                self.claimed.add(device_id)
            each.soon.discard(device_id)
        self.expect(reservation.devices, until)

    def expect(self, devices: DevicesByNode, until: float) -> None:
        """Count these devices as used until an instant, for estimates of later runs."""
        for device_id in (d for ids in devices.values() for d in ids):
            self._bin_of[device_id].free_at[device_id] = until


def may_use(run: WaitingRun, each: NodeDevices) -> bool:
    """Whether the run may use devices of this bin at all: kind, pool, catalogue, checkpoint, retry rules."""
    node = each.node
    return (
        run.kind in ("any", each.kind)
        and (run.pools is None or node.pool_id in run.pools)
        and run.needs <= node.offers
        and (run.home is None or run.home[0] == node.node_id)
        and node.node_id not in run.excluded_nodes
    )
