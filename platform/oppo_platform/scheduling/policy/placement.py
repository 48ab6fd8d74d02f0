"""Which devices: the free ones by node and kind, and the choice of a node or of whole nodes for a gang.

A run's devices are of one kind and in one pool. It gets them on the fullest node that has enough (best fit: that leaves the
larger gaps whole); when no node is large enough and the run allows several, it gets whole nodes, and the rest on one more. A run
that asks for a number of nodes gets exactly so many, the fullest that have its part, with an equal part of its devices on each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oppo_platform.scheduling.policy.snapshot import DevicesByNode, Node, Reservation, RunningRun, Snapshot, WaitingRun

UNKNOWN = math.inf  # an instant that nobody can tell


@dataclass(slots=True, eq=False)
class Bin:
    """The ready devices of one kind on one node. Every device id is in `free_at` and in at most one of `free` and `kept`."""

    node: Node
    kind: str
    model: str
    registered: int  # in any state
    free: list[int] = field(default_factory=list)  # nobody's, not reserved
    kept: dict[int, Reservation] = field(default_factory=dict)  # nobody's now, reserved
    soon: set[int] = field(default_factory=set)  # held by a run that is being stopped, claimed by nobody
    free_at: dict[int, float] = field(default_factory=dict)  # when it is expected to be free for the next in the queue

    @property
    def size(self) -> int:
        """How many of its devices are in order, free or held."""
        return len(self.free_at)


@dataclass(slots=True, eq=False)
class Place:
    """The bins of one pool and kind that a demand could use.

    What was found not to fit is not tried again: within a plan free devices only become fewer.
    """

    pool_id: int
    kind: str
    bins: list[Bin]
    full: bool = False
    no_gap_until: float = UNKNOWN  # a run of this length or longer was found not to fit around the reservations


@dataclass(slots=True, eq=False)
class Demand:
    """What equal requests have in common, worked out once a plan: how much, and the places that could ever give it."""

    devices: int
    nodes_max: int
    nodes: int | None
    places: list[Place]


class Wanted(Protocol):
    """How many devices, and on how many nodes: a waiting run, or a demand."""

    @property
    def devices(self) -> int: ...
    @property
    def nodes_max(self) -> int: ...
    @property
    def nodes(self) -> int | None: ...


Cut = list[tuple[Bin, int]]  # so many devices of each bin


def best_fit(bins: Iterable[Bin], devices: int, amount: Callable[[Bin], int]) -> Bin | None:
    """The bin with the least that is enough; `amount` says how much a bin offers."""
    enough = ((offered, each.node.node_id, each) for each in bins if (offered := amount(each)) >= devices)
    found = min(enough, key=lambda entry: entry[:2], default=None)
    return None if found is None else found[2]


def cut(bins: Sequence[Bin], wanted: Wanted, amount: Callable[[Bin], int]) -> Cut | None:
    """Devices on one node, else on whole nodes (all that is in order there) and the rest on one more; None: it does not fit.

    Or on exactly as many nodes as are asked for.
    """
    if wanted.nodes is not None:
        return even_cut(bins, wanted.devices // wanted.nodes, wanted.nodes, amount)
    return whole_cut(bins, wanted.devices, wanted.nodes_max, amount)


def even_cut(bins: Sequence[Bin], each: int, nodes: int, amount: Callable[[Bin], int]) -> Cut | None:
    """So many devices on each of exactly so many nodes, on those with the least that is enough; None: it does not fit."""
    enough = sorted((offered, b.node.node_id) for b in bins if (offered := amount(b)) >= each)
    chosen = {node_id for _, node_id in enough[:nodes]}
    return [(b, each) for b in bins if b.node.node_id in chosen] if len(chosen) == nodes else None


def whole_cut(bins: Sequence[Bin], devices: int, nodes_max: int, amount: Callable[[Bin], int]) -> Cut | None:
    """Devices on one node, else on whole nodes and the rest on one more; None: it does not fit."""
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


class Room:
    """The cluster's devices, and the changes that a plan makes to them."""

    def __init__(self, snapshot: Snapshot, now: float) -> None:
        """Read the snapshot: devices that are ready, who holds them, and until when."""
        self.now = now
        self._pool_names = {pool.pool_id: pool.name for pool in snapshot.pools}
        self._stop_s = snapshot.settings.stop_s
        self.nodes = sorted(snapshot.nodes, key=lambda node: node.node_id)
        self.low_on_disk = [node for node in self.nodes if node.low_disk and node.connected and not node.draining]
        self.bins: dict[tuple[int, str], Bin] = {}
        self._bin_of: dict[int, Bin] = {}
        self._demands: dict[tuple[object, ...], Demand] = {}
        self.free_in: dict[int, int] = {pool.pool_id: 0 for pool in snapshot.pools}
        self.kept_in: set[int] = set()  # pools with a free device that is reserved
        self.claimed: set[int] = set()  # held by somebody now, reserved for when they come free
        holders = {device: run for run in snapshot.running for ids in run.devices.values() for device in ids}
        for node in self.nodes:
            self._read(node, holders)

    def _read(self, node: Node, holders: dict[int, RunningRun]) -> None:
        for device in sorted(node.devices, key=lambda d: d.device_id):
            key = (node.node_id, device.kind)
            each = self.bins.setdefault(key, Bin(node, device.kind, device.model, 0))
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
        """When a running run is expected to be off its devices."""
        if run.stopping:
            return self.now + self._stop_s
        end = UNKNOWN if run.expected_end is None else run.expected_end
        if run.backfill is not None and run.backfill.until > self.now:
            end = min(end, run.backfill.until)
        return max(self.now, end)

    def demand(self, run: WaitingRun) -> Demand:
        """The run's demand, shared with all runs that ask for the same."""
        home = None if run.home is None else run.home[0]
        key = (run.devices, run.nodes_max, run.nodes, run.kind, run.needs, run.pools, home, run.excluded_nodes)
        if key not in self._demands:
            self._demands[key] = Demand(run.devices, run.nodes_max, run.nodes, list(self._places(run)))
        return self._demands[key]

    def _places(self, run: WaitingRun) -> Iterator[Place]:
        groups: dict[tuple[bool, int, str], list[Bin]] = {}
        for each in self.bins.values():
            if each.node.schedulable and each.size and may_use(run, each):
                groups.setdefault((each.kind != "cuda", each.node.pool_id, each.kind), []).append(each)
        for (_, pool_id, kind), bins in sorted(groups.items()):
            if cut(bins, run, lambda b: b.size):
                yield Place(pool_id, kind, bins)

    def fit(self, demand: Demand, place: Place) -> DevicesByNode | None:
        """Free devices that nobody has reserved, or None."""
        if place.full or self.free_in.get(place.pool_id, 0) < demand.devices:
            return None
        chosen = cut(place.bins, demand, lambda b: len(b.free))
        place.full = chosen is None
        return None if chosen is None else {b.node.node_id: tuple(b.free[:count]) for b, count in chosen}

    def fit_around(self, demand: Demand, place: Place, until: float) -> DevicesByNode | None:
        """Free devices, also those reserved for an instant that is not before `until`."""
        if until >= place.no_gap_until or place.pool_id not in self.kept_in:
            return None
        open_to = {
            b: [*b.free, *(d for d, kept in b.kept.items() if kept.start is not None and until <= kept.start)] for b in place.bins
        }
        chosen = cut(place.bins, demand, lambda b: len(open_to[b]))
        if chosen is None:
            place.no_gap_until = until
            return None
        return {b.node.node_id: tuple(open_to[b][:count]) for b, count in chosen}

    def pool_name(self, pool_id: int) -> str:
        """The pool's name, for people."""
        return self._pool_names.get(pool_id, str(pool_id))

    def bin_of(self, device_id: int) -> Bin | None:
        """The bin of a device that is in order, else None."""
        return self._bin_of.get(device_id)

    def take(self, devices: DevicesByNode, until: float) -> list[Reservation]:
        """Give these free devices away until an instant; the reservations that lay on them."""
        crossed = []
        for device_id in (d for ids in devices.values() for d in ids):
            each = self._bin_of[device_id]
            if device_id in each.kept:
                crossed.append(each.kept.pop(device_id))
            else:
                each.free.remove(device_id)
                self.free_in[each.node.pool_id] -= 1
            each.free_at[device_id] = until
        return crossed

    def keep(self, reservation: Reservation, until: float) -> None:
        """Reserve devices: the free ones are kept from everyone behind, the others are claimed for when they come free."""
        for device_id in (d for ids in reservation.devices.values() for d in ids):
            each = self._bin_of[device_id]
            if device_id in each.free:
                each.free.remove(device_id)
                self.free_in[each.node.pool_id] -= 1
                each.kept[device_id] = reservation
                self.kept_in.add(each.node.pool_id)
            else:
                self.claimed.add(device_id)
            each.soon.discard(device_id)
        self.expect(reservation.devices, until)

    def expect(self, devices: DevicesByNode, until: float) -> None:
        """Count these devices as used until an instant, for the estimates of those behind."""
        for device_id in (d for ids in devices.values() for d in ids):
            self._bin_of[device_id].free_at[device_id] = until


def may_use(run: WaitingRun, each: Bin) -> bool:
    """Whether the run may use devices of this bin at all: kind, pool, catalogue, checkpoint, retry rules."""
    node = each.node
    return (
        run.kind in ("any", each.kind)
        and (run.pools is None or node.pool_id in run.pools)
        and run.needs <= node.offers
        and (run.home is None or run.home[0] == node.node_id)
        and node.node_id not in run.excluded_nodes
    )
