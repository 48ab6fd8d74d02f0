"""What every plan must satisfy, each property a function that raises AssertionError; none uses the policy's own parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

import oppo_platform.scheduling.policy as policy
from oppo_platform.scheduling.policy import (
    Decisions,
    Node,
    Placement,
    PolicySettings,
    Reservation,
    RunningRun,
    Snapshot,
    WaitingRun,
)
from tests.simulation.policy_snapshots import NOW, shuffled

Property = Callable[[Snapshot, Decisions], None]
Account = tuple[int, int]


def ids_of(entry: Placement | Reservation | RunningRun) -> list[int]:
    """All device ids of a placement, reservation or running run."""
    return [device_id for ids in entry.devices.values() for device_id in ids]


def free_devices(snapshot: Snapshot) -> set[int]:
    """Devices that may be given away now."""
    held = {d for run in snapshot.running for d in ids_of(run)}
    nodes = [n for n in snapshot.nodes if n.connected and not n.draining and not n.low_disk]
    return {d.device_id for n in nodes for d in n.devices if d.state == "ready" and d.held_by is None} - held


def usage(snapshot: Snapshot, decisions: Decisions) -> Counter[Account]:
    """Devices by team and pool once the placements have begun."""
    pool_of = {node.node_id: node.pool_id for node in snapshot.nodes}
    team_of = {run.run_id: run.team_id for run in snapshot.waiting}
    used: Counter[Account] = Counter()
    for run in snapshot.running:
        for node_id, ids in run.devices.items():
            used[run.team_id, pool_of[node_id]] += len(ids)
    for placement in decisions.placements:
        used[team_of[placement.run_id], placement.pool_id] += len(ids_of(placement))
    return used


def no_device_twice(snapshot: Snapshot, decisions: Decisions) -> None:
    """Only free devices are given away, each once."""
    given = [d for placement in decisions.placements for d in ids_of(placement)]
    assert len(given) == len(set(given))
    assert set(given) <= free_devices(snapshot)


def no_quota_exceeded(snapshot: Snapshot, decisions: Decisions) -> None:
    """No team that got something in a pool is beyond nominal + borrow cap there."""
    used, team_of = usage(snapshot, decisions), {run.run_id: run.team_id for run in snapshot.waiting}
    teams = {team.team_id: team for team in snapshot.teams}
    for placement in decisions.placements:
        account = team_of[placement.run_id], placement.pool_id
        limit = teams[account[0]].quota(account[1]).limit
        assert limit is None or used[account] <= limit


def gangs_whole(snapshot: Snapshot, decisions: Decisions) -> None:
    """A placed run has all its devices, of one kind and pool, where it may be: on one node, or on whole nodes and one more."""
    nodes = {node.node_id: node for node in snapshot.nodes}
    runs = {run.run_id: run for run in snapshot.waiting}
    for placement in decisions.placements:
        run, on = runs[placement.run_id], [nodes[node_id] for node_id in placement.devices]
        assert len(ids_of(placement)) == run.devices
        assert all(_suits(run, node, placement) for node in on)
        assert len({d.kind for n in on for d in n.devices if d.device_id in placement.devices[n.node_id]}) == 1
        if run.nodes is not None:
            continue
        assert 1 <= len(on) <= run.nodes_max
        partly = [n for n in on if len(placement.devices[n.node_id]) < sum(d.state == "ready" for d in n.devices)]
        assert len(on) == 1 or len(partly) <= 1


def exact_nodes(snapshot: Snapshot, decisions: Decisions) -> None:
    """A run that asks for a number of nodes has, and is reserved, exactly so many, with an equal part on each."""
    runs = {run.run_id: run for run in snapshot.waiting}
    for entry in (*decisions.placements, *decisions.reservations):
        run = runs[entry.run_id]
        if run.nodes is None:
            continue
        assert [len(ids) for ids in entry.devices.values()] == [run.devices // run.nodes] * run.nodes
        assert all(d // 100 == node_id for node_id, ids in entry.devices.items() for d in ids)


def _suits(run: WaitingRun, node: Node, placement: Placement) -> bool:
    kinds = {d.kind for d in node.devices if d.device_id in placement.devices[node.node_id]}
    return (
        node.pool_id == placement.pool_id
        and run.needs <= node.offers
        and (run.home is None or run.home[0] == node.node_id)
        and node.node_id not in run.excluded_nodes
        and (run.kind == "any" or kinds == {run.kind})
        and (run.not_before or 0) <= NOW
    )


def everyone_told(snapshot: Snapshot, decisions: Decisions) -> None:
    """Every waiting run is placed or has a reason with words; those that wait have a place in the order."""
    placed = [placement.run_id for placement in decisions.placements]
    assert len(placed) == len(set(placed))
    assert {*placed, *decisions.reasons} == {run.run_id for run in snapshot.waiting}
    assert not set(placed) & set(decisions.reasons)
    assert sorted(decisions.order) == sorted(decisions.reasons)
    assert all(reason.code and reason.text.endswith(".") for reason in decisions.reasons.values())
    estimates = [r.estimated_start for r in decisions.reasons.values() if r.estimated_start is not None]
    assert all(estimate >= NOW for estimate in estimates)


def deterministic(snapshot: Snapshot, decisions: Decisions) -> None:
    """The plan depends on what the snapshot holds, not on the order in which it is listed."""
    for seed in range(3):
        again = policy.plan(shuffled(snapshot, Random(seed)), NOW)
        assert again == decisions


def protection_s(settings: PolicySettings, preempted: int) -> float:
    """For how long a run is left alone: the minimum time, doubled by each of its preemptions, eightfold at most."""
    return settings.min_runtime_s * (1, 2, 4, 8)[min(preempted, 3)]


def victims_allowed(snapshot: Snapshot, decisions: Decisions) -> None:
    """Only preemptible runs past their minimum time, which grows with each preemption, once, and with a title to it."""
    running, waiting = {r.run_id: r for r in snapshot.running}, {r.run_id: r for r in snapshot.waiting}
    assert len({p.run_id for p in decisions.preemptions}) == len(decisions.preemptions)
    for preemption in decisions.preemptions:
        victim, run = running[preemption.run_id], waiting[preemption.for_run_id]
        assert victim.preemptible
        assert not victim.stopping
        assert NOW - victim.started_at >= protection_s(snapshot.settings, victim.preempted)
        if preemption.code == "priority":
            assert victim.team_id == run.team_id
            assert victim.priority < run.priority
        elif preemption.code == "backfill":
            assert victim.backfill is not None
            assert victim.backfill.for_run_id == run.run_id
            assert victim.backfill.until <= NOW
        else:
            assert preemption.code == "reclaim"
            assert victim.team_id != run.team_id


def only_borrowed_reclaimed(snapshot: Snapshot, decisions: Decisions) -> None:
    """Reclaiming takes from teams that use more than their own in that pool."""
    pool_of, held = {node.node_id: node.pool_id for node in snapshot.nodes}, usage(snapshot, decisions)
    for run in (r for r in snapshot.running if r.stopping):
        for node_id, ids in run.devices.items():
            held[run.team_id, pool_of[node_id]] -= len(ids)
    teams, running = {t.team_id: t for t in snapshot.teams}, {r.run_id: r for r in snapshot.running}
    pool_for = {r.run_id: r.pool_id for r in decisions.reservations}
    for preemption in (p for p in decisions.preemptions if p.code == "reclaim"):
        victim, pool_id = running[preemption.run_id], pool_for[preemption.for_run_id]
        assert held[victim.team_id, pool_id] > teams[victim.team_id].quota(pool_id).nominal


def victims_minimal(snapshot: Snapshot, decisions: Decisions) -> None:
    """Without any one of its victims a run would not have room (judged on what nobody else got or reserved, and its quota).

    A run of the own team may also have to make way so that its team is within its quota and may reclaim the others: that is not
    judged here.
    """
    running, waiting = {r.run_id: r for r in snapshot.running}, {r.run_id: r for r in snapshot.waiting}
    by_run: dict[int, dict[int, str]] = {}
    for preemption in decisions.preemptions:
        by_run.setdefault(preemption.for_run_id, {})[preemption.run_id] = preemption.code
    for run_id, victims in by_run.items():
        mixed = "reclaim" in victims.values()
        for spared in (v for v, code in victims.items() if code == "reclaim" or not mixed):
            left = [running[v] for v in victims if v != spared]
            assert not _has_room(waiting[run_id], left, snapshot, decisions)


def _has_room(run: WaitingRun, victims: Iterable[RunningRun], snapshot: Snapshot, decisions: Decisions) -> bool:
    gone = {d for victim in victims for d in ids_of(victim)}
    stopping = {d for other in snapshot.running if other.stopping for d in ids_of(other)}
    others = {d for r in decisions.reservations if r.run_id != run.run_id for d in ids_of(r)}
    given = {d for placement in decisions.placements for d in ids_of(placement)}
    room = (free_devices(snapshot) | stopping | gone) - others - given
    pool_id = next(r.pool_id for r in decisions.reservations if r.run_id == run.run_id)
    return _quota_free(run, pool_id, victims, snapshot, decisions) and _fits(run, pool_id, room, snapshot)


def _quota_free(run: WaitingRun, pool_id: int, victims: Iterable[RunningRun], snapshot: Snapshot, decisions: Decisions) -> bool:
    limit = next(t for t in snapshot.teams if t.team_id == run.team_id).quota(pool_id).limit
    if limit is None:
        return True
    nodes = {n.node_id for n in snapshot.nodes if n.pool_id == pool_id}
    targets = [p.for_run_id for p in decisions.preemptions]
    earlier = decisions.preemptions[: targets.index(run.run_id)]  # what is decided later was not there to count on
    stopped = {p.run_id for p in earlier} | {v.run_id for v in victims}
    leaving = [r for r in snapshot.running if r.team_id == run.team_id and (r.stopping or r.run_id in stopped)]
    left = sum(len(ids) for r in leaving for node_id, ids in r.devices.items() if node_id in nodes)
    mine = {w.run_id for w in snapshot.waiting if w.team_id == run.team_id and w.run_id != run.run_id}
    promised = sum(len(ids_of(r)) for r in decisions.reservations if r.run_id in mine and r.pool_id == pool_id)
    quota_heads = [i for i, reason in decisions.reasons.items() if i in mine and reason.code == "quota"]
    devices = {w.run_id: w.devices for w in snapshot.waiting}
    promised += max((devices[i] for i in quota_heads), default=0)
    return usage(snapshot, decisions)[run.team_id, pool_id] - left + promised + run.devices <= limit


def _fits(run: WaitingRun, pool_id: int, room: set[int], snapshot: Snapshot) -> bool:
    """Whether these devices hold the run on one node, or on as many as it asks for.

    Whole nodes are left to other tests: this errs on the safe side.
    """
    enough: Counter[str] = Counter()
    for node in snapshot.nodes:
        if (
            not (node.connected and not node.draining and not node.low_disk and node.pool_id == pool_id)
            or node.node_id in run.excluded_nodes
        ):
            continue
        if not run.needs <= node.offers or (run.home and run.home[0] != node.node_id):
            continue
        ready = [d for d in node.devices if d.state == "ready" and run.kind in ("any", d.kind) and d.device_id in room]
        if run.nodes is None and len(ready) >= run.devices:
            return True
        if run.nodes is not None and len(ready) >= run.devices // run.nodes:
            enough[node.devices[0].kind] += 1
    return any(count >= run.nodes for count in enough.values()) if run.nodes is not None else False


def reservations_kept(snapshot: Snapshot, decisions: Decisions) -> None:
    """Nobody starts on a reserved device who is not sure to be off it in time.

    A reservation may also have been made behind a run that this very plan started: then it begins when that run should end.
    """
    runs = {run.run_id: run for run in snapshot.waiting}
    for placement in decisions.placements:
        run, devices = runs[placement.run_id], set(ids_of(placement))
        crossed = [r for r in decisions.reservations if devices & set(ids_of(r))]
        if placement.backfill is None:
            estimate = run.max_runtime_s if _measured(run) is None else min(_measured(run), run.max_runtime_s or 1e99)
            assert all(r.start is None or (estimate is not None and NOW + estimate <= r.start) for r in crossed)
            continue
        protected_s = protection_s(snapshot.settings, run.preempted)
        bounds = [run.max_runtime_s, max(_measured(run), protected_s) if _stoppable(run) else None]
        known = [bound for bound in bounds if bound is not None]
        assert known
        assert NOW + min(known) <= placement.backfill.until
        assert any(r.run_id == placement.backfill.for_run_id and r.start == placement.backfill.until for r in crossed)


def _measured(run: WaitingRun) -> float | None:
    return None if not run.steps_per_s or run.steps_left is None else run.steps_left / run.steps_per_s


def _stoppable(run: WaitingRun) -> bool:
    return run.preemptible and _measured(run) is not None


def own_quota_first(snapshot: Snapshot, decisions: Decisions) -> None:
    """While the first run of a team waits within its own quota for one device, nobody begins to borrow a device it could use."""
    used, before = usage(snapshot, decisions), usage(snapshot, Decisions())
    teams, runs = {t.team_id: t for t in snapshot.teams}, {r.run_id: r for r in snapshot.waiting}
    firsts: dict[int, WaitingRun] = {}
    for run in sorted(snapshot.waiting, key=lambda r: (-r.priority, r.submitted_at, r.run_id)):
        if (run.not_before or 0) <= NOW and decisions_about(run, decisions) not in HOPELESS:
            firsts.setdefault(run.team_id, run)
    reserved = {r.run_id for r in snapshot.reservations}
    for run in (r for r in firsts.values() if r.run_id in decisions.reasons and r.devices == 1):
        for placement in decisions.placements:
            other, pool_id = runs[placement.run_id], placement.pool_id
            within = used[run.team_id, pool_id] < teams[run.team_id].quota(pool_id).nominal
            borrows = before[other.team_id, pool_id] + other.devices > teams[other.team_id].quota(pool_id).nominal
            first = firsts[other.team_id] is other and placement.run_id not in reserved and placement.backfill is None
            usable = _fits(run, pool_id, set(ids_of(placement)), snapshot)
            assert not (within and borrows and first and usable)


HOPELESS = {
    "backoff",
    "home_away",
    "missing",
    "apart",
    "excluded",
    "kind",
    "too_large",
    "unhealthy",
    "quota_never",
    "no_node",
}


def decisions_about(run: WaitingRun, decisions: Decisions) -> str:
    """The code of its reason; "" when it was placed."""
    return decisions.reasons[run.run_id].code if run.run_id in decisions.reasons else ""


PROPERTIES: dict[str, Property] = {
    each.__name__: each
    for each in (
        no_device_twice,
        no_quota_exceeded,
        gangs_whole,
        exact_nodes,
        everyone_told,
        deterministic,
        victims_allowed,
        only_borrowed_reclaimed,
        victims_minimal,
        reservations_kept,
        own_quota_first,
    )
}
