"""Who gets which devices: a pure function from what waits and what is free to placements and reasons.

Law: higher priority first, then the one that was queued first; a run gets all its devices on one node, or none. A run that could
go on some nodes but does not fit now keeps those nodes from all behind it, so that a large run is never starved by small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

LONG_AGO = datetime.min.replace(tzinfo=UTC)
Need = tuple[str, str]  # ("model" | "prompts", id)


@dataclass(frozen=True, slots=True)
class WaitingRun:
    """A queued run. `queued_at`: its place among equals; `home`: its checkpoint's node (id, name), when storage is not shared."""

    run_id: int
    priority: int
    devices: int
    queued_at: datetime = LONG_AGO
    kind: str = "any"
    needs: frozenset[Need] = frozenset()
    home: tuple[int, str] | None = None
    excluded_nodes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device that may be given away; `free` when nobody holds it and its state is known."""

    device_id: int
    kind: str
    free: bool


@dataclass(frozen=True, slots=True)
class NodeView:
    """A connected node: its devices by index, and what its catalogue offers."""

    node_id: int
    name: str
    devices: tuple[DeviceView, ...]
    offers: frozenset[Need] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """These devices of this node go to this run."""

    run_id: int
    node_id: int
    device_ids: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """What one cycle decided. Every waiting run is either placed or told why not."""

    placements: list[Placement] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)


def make_plan(waiting: Iterable[WaitingRun], nodes: Sequence[NodeView]) -> Plan:
    """Place what fits, in order, and say of the others what they wait for."""
    result = Plan()
    taken: set[int] = set()
    kept: dict[int, int] = {}  # node id → runs in front that wait for it
    for run in sorted(waiting, key=lambda w: (-w.priority, w.queued_at, w.run_id)):
        able = [node for node in nodes if _could_ever_run(run, node)]
        fitting = [(node, free) for node in able if node.node_id not in kept and (free := _free(run, node, taken))]
        if fitting:
            node, device_ids = min(fitting, key=lambda pair: _slack(pair[0], taken))
            taken.update(device_ids)
            result.placements.append(Placement(run.run_id, node.node_id, device_ids))
            continue
        result.reasons[run.run_id] = _reason(run, able, nodes, taken, kept)
        for node in able:
            kept[node.node_id] = kept.get(node.node_id, 0) + 1
    return result


def _by_kind(run: WaitingRun, node: NodeView) -> dict[str, list[DeviceView]]:
    kinds: dict[str, list[DeviceView]] = {}
    for device in node.devices:
        if run.kind in ("any", device.kind):
            kinds.setdefault(device.kind, []).append(device)
    return kinds


def _may_read(run: WaitingRun, node: NodeView) -> bool:
    at_home = run.home is None or run.home[0] == node.node_id
    return run.needs <= node.offers and at_home and node.node_id not in run.excluded_nodes


def _could_ever_run(run: WaitingRun, node: NodeView) -> bool:
    return _may_read(run, node) and any(len(devices) >= run.devices for devices in _by_kind(run, node).values())


def _free(run: WaitingRun, node: NodeView, taken: set[int]) -> tuple[int, ...]:
    """The devices it would get on this node, all of one kind; empty when they do not suffice."""
    for _, devices in sorted(_by_kind(run, node).items(), key=lambda item: item[0] != "cuda"):
        free = [device.device_id for device in devices if device.free and device.device_id not in taken]
        if len(free) >= run.devices:
            return tuple(free[: run.devices])
    return ()


def _slack(node: NodeView, taken: set[int]) -> tuple[int, int]:
    # The fullest node first: it leaves the larger gaps whole.
    return sum(d.free and d.device_id not in taken for d in node.devices), node.node_id


def _reason(run: WaitingRun, able: list[NodeView], nodes: Sequence[NodeView], taken: set[int], kept: dict[int, int]) -> str:
    if not nodes:
        return "No worker is connected."
    if not able:
        return _why_never(run, nodes)
    ahead = max((kept.get(node.node_id, 0) for node in able), default=0)
    if ahead and any(_free(run, node, taken) for node in able):
        return f"{_runs(ahead)} in front of it {'waits' if ahead == 1 else 'wait'} for the same devices."
    usable = [device for node in able for device in node.devices if run.kind in ("any", device.kind)]
    free = sum(device.free and device.device_id not in taken for device in usable)
    queue = f" {_runs(ahead)} {'is' if ahead == 1 else 'are'} in front of it." if ahead else ""
    if free == 0:
        used = "the only one that would do is" if len(usable) == 1 else f"all {len(usable)} that would do are"
        return f"Waits for {_devices(run)}: {used} in use.{queue}"
    return f"Waits for {_devices(run)} on one node: {free} of {len(usable)} are free, not enough together.{queue}"


def _why_never(run: WaitingRun, nodes: Sequence[NodeView]) -> str:
    if run.home is not None and all(node.node_id != run.home[0] for node in nodes):
        return f"Its checkpoint lies on node {run.home[1]}, which is not connected; storage is not shared."
    for kind, name in sorted(run.needs):
        if all((kind, name) not in node.offers for node in nodes):
            return f"No connected worker has the {'model' if kind == 'model' else 'prompts'} {name}."
    able = [node.node_id for node in nodes if run.needs <= node.offers]
    if able and run.excluded_nodes >= set(able):
        return "Its retry rules exclude every connected worker that it could run on."
    if not any(_may_read(run, node) for node in nodes):
        return "No single connected worker has all the models and prompts it needs."
    most = max(len(devices) for node in nodes for devices in [*_by_kind(run, node).values(), []])
    return f"Needs {_devices(run)} on one node; the largest connected one that would do has {most}."


def _devices(run: WaitingRun) -> str:
    kind = "" if run.kind == "any" else f"{run.kind} "
    return f"{run.devices} {kind}device" + ("s" if run.devices != 1 else "")


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
