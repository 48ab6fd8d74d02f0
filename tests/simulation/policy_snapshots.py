"""Random snapshots for the property tests of the scheduling policy: small, crowded, with every feature now and then."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from oppo_platform.scheduling.policy import (
    Backfill,
    Device,
    Node,
    PolicySettings,
    Pool,
    Quota,
    Reservation,
    RunningRun,
    Snapshot,
    Team,
    WaitingRun,
)

NOW = 10_000.0
NEED = ("model", "m")
SETTINGS = PolicySettings(half_life_s=50_000.0, submit_penalty_s=300.0, min_runtime_s=200.0, stop_s=30.0, lookahead=6)


def random_snapshot(rng: Random) -> Snapshot:
    """A cluster of one or two pools with up to 20 devices, three teams, and more work than it holds."""
    pools = tuple(Pool(i, f"pool{i}") for i in range(1, rng.choice([1, 1, 2]) + 1))
    nodes = [_node(rng, i + 1, rng.choice(pools).pool_id) for i in range(rng.randint(1, 5))]
    nodes, busy = _occupy(rng, nodes)
    queue = tuple(_waiting(rng, i + 1, nodes) for i in range(rng.randint(0, 14)))
    teams = tuple(_team(rng, i + 1, pools) for i in range(3))
    return Snapshot(pools, tuple(nodes), teams, queue, busy, _reserved(rng, queue, nodes), SETTINGS)


def shuffled(snapshot: Snapshot, rng: Random) -> Snapshot:
    """The same snapshot with everything listed in another order."""

    def mixed(items):  # type: ignore[no-untyped-def]
        return tuple(rng.sample(items, len(items)))

    nodes = mixed(tuple(replace(node, devices=mixed(node.devices)) for node in snapshot.nodes))
    return replace(
        snapshot,
        pools=mixed(snapshot.pools),
        nodes=nodes,
        teams=mixed(snapshot.teams),
        waiting=mixed(snapshot.waiting),
        running=mixed(snapshot.running),
        reservations=mixed(snapshot.reservations),
    )


def _node(rng: Random, number: int, pool_id: int) -> Node:
    kind = rng.choice(["cuda"] * 9 + ["cpu"])
    states = ["ready"] * 12 + ["quarantined", "unknown"]
    devices = tuple(Device(number * 100 + i, kind, "H100", rng.choice(states)) for i in range(rng.choice([1, 2, 4, 4, 4])))
    offers = frozenset([NEED] if rng.random() < 0.7 else [])
    away = rng.random()
    there = {"connected": away > 0.05, "draining": away > 0.95, "low_disk": 0.9 < away < 0.95}
    return Node(number, f"n{number}", pool_id, devices, offers, **there)


def _occupy(rng: Random, nodes: list[Node]) -> tuple[list[Node], tuple[RunningRun, ...]]:
    """Give runs of devices to running runs; a few hold devices on two nodes."""
    share = rng.choice([0.0, 0.5, 0.8, 1.0])
    groups: list[list[int]] = []
    for node in nodes:
        ready = [d.device_id for d in node.devices if d.state == "ready" and rng.random() < share]
        while ready:
            count = rng.randint(1, len(ready))
            if groups and rng.random() < 0.1:
                groups[-1] += ready[:count]
            else:
                groups.append(ready[:count])
            ready = ready[count:]
    busy = tuple(_running(rng, 1000 + i, ids) for i, ids in enumerate(groups))
    holder = {d: run.run_id for run in busy for ids in run.devices.values() for d in ids}
    held = [replace(n, devices=tuple(replace(d, held_by=holder.get(d.device_id)) for d in n.devices)) for n in nodes]
    return held, busy


def _running(rng: Random, run_id: int, ids: list[int]) -> RunningRun:
    by_node: dict[int, tuple[int, ...]] = {}
    for device_id in ids:
        by_node[device_id // 100] = (*by_node.get(device_id // 100, ()), device_id)
    return RunningRun(
        run_id,
        rng.randint(1, 3),
        by_node,
        priority=rng.choice([20, 50, 80]),
        preemptible=rng.random() < 0.75,
        started_at=NOW - rng.choice([50, 400, 400, 3000, 3000]) - rng.randint(0, 5),
        expected_end=rng.choice([None, NOW - 5, NOW + 20, NOW + 500, NOW + 4000]),
        stopping=rng.random() < 0.1,
        backfill=Backfill(rng.randint(1, 8), NOW - 10) if rng.random() < 0.1 else None,
        preempted=rng.choice([0, 0, 0, 1, 3, 20]),
    )


def _waiting(rng: Random, run_id: int, nodes: list[Node]) -> WaitingRun:
    home, exactly = rng.choice(nodes), rng.choice([None] * 6 + [2, 2, 3])
    return WaitingRun(
        run_id,
        rng.randint(1, 3),
        rng.choice([1, 1, 1, 1, 2, 2, 2, 3, 4, 6]) if exactly is None else exactly * rng.choice([1, 1, 2]),
        nodes=exactly,
        priority=rng.choice([20, 50, 50, 80]),
        nodes_max=rng.choice([1, 1, 2, 3]),
        kind=rng.choice(["any", "cuda", "cuda"]),
        needs=frozenset([NEED] if rng.random() < 0.15 else []),
        home=(home.node_id, home.name) if rng.random() < 0.1 else None,
        submitted_at=float(rng.randint(0, 4)),
        preemptible=rng.random() < 0.75,
        max_runtime_s=rng.choice([None, None, 100.0, 600.0, 5000.0]),
        steps_left=rng.choice([None, 10, 100, 1000]),
        steps_per_s=rng.choice([None, 0.5, 2.0]),
        excluded_nodes=frozenset([home.node_id]) if rng.random() < 0.1 else frozenset(),
        not_before=NOW + 60 if rng.random() < 0.05 else None,
        preempted=rng.choice([0, 0, 0, 1, 3, 20]),
    )


def _team(rng: Random, team_id: int, pools: tuple[Pool, ...]) -> Team:
    quotas = {p.pool_id: Quota(rng.randint(0, 6), rng.choice([None, None, 0, 2, 4])) for p in pools if rng.random() < 0.6}
    usage = rng.choice([0.0, 1e3, 1e5])
    return Team(team_id, f"team{team_id}", rng.choice([0.5, 1.0, 1.0, 2.0]), quotas, usage, NOW - rng.choice([0, 100, 5000]))


def _reserved(rng: Random, queue: tuple[WaitingRun, ...], nodes: list[Node]) -> tuple[Reservation, ...]:
    if not queue or rng.random() < 0.7:
        return ()
    run, node = rng.choice(queue), rng.choice(nodes)
    devices = tuple(d.device_id for d in node.devices[: run.devices])
    return (Reservation(run.run_id, node.pool_id, {node.node_id: devices}, NOW + 50),)
