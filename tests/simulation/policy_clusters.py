"""Small clusters and queues for the tests of the scheduling policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oppo_platform.scheduling.policy import Device, Node, PolicySettings, Pool, Quota, RunningRun, Snapshot, Team, WaitingRun

POOL = 1
NEEDS = (("model", "m"), ("prompts", "p"))


def node(number: int, devices: int = 4, held: Mapping[int, int] | None = None, **changes: Any) -> Node:
    """Node `number` in pool 1; device i has id 100·number + i; `held`: run ids by index."""
    holders, kind, model = held or {}, changes.pop("kind", "cuda"), changes.pop("model", "")
    states = changes.pop("states", {})
    ids = range(number * 100, number * 100 + devices)
    made = tuple(Device(d, kind, model, states.get(i, "ready"), holders.get(i)) for i, d in enumerate(ids))
    return Node(number, f"n{number}", changes.pop("pool_id", POOL), made, **changes)


def running(run_id: int, team_id: int, devices: Sequence[int], **changes: Any) -> RunningRun:
    """A run on these devices (node = id ÷ 100), started long ago unless told."""
    by_node: dict[int, tuple[int, ...]] = {}
    for device_id in devices:
        by_node[device_id // 100] = (*by_node.get(device_id // 100, ()), device_id)
    return RunningRun(run_id, team_id, by_node, **{"started_at": -1e5, **changes})


def waiting(run_id: int, team_id: int = 1, devices: int = 1, **changes: Any) -> WaitingRun:
    """A waiting run, submitted at its number."""
    return WaitingRun(run_id, team_id, devices, **{"submitted_at": float(run_id), **changes})


def cluster(nodes: Sequence[Node], queue: Sequence[WaitingRun] = (), busy: Sequence[RunningRun] = (), **changes: Any) -> Snapshot:
    """A snapshot; teams 1 (alpha), 2 (beta) and 3 (gamma) without quotas unless told."""
    names = {1: "alpha", 2: "beta", 3: "gamma"}
    quotas: Mapping[int, Quota] = changes.pop("quotas", {})
    usage: Mapping[int, float] = changes.pop("usage", {})
    teams = tuple(
        Team(i, names[i], quotas={POOL: quotas[i]} if i in quotas else {}, usage_gpu_s=usage.get(i, 0.0)) for i in names
    )
    settings = changes.pop("settings", PolicySettings())
    return Snapshot((Pool(POOL, "h100"),), tuple(nodes), teams, tuple(queue), tuple(busy), settings=settings, **changes)
