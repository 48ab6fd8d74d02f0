"""Builds the policy's snapshot of the cluster from the database: a handful of queries, no decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Count, F, Q
from django.db.models.functions import Coalesce

from oppo_contract.states import HOLDING_DEVICES, RunState
from oppo_contract.wire import SUPPORTED_VERSIONS
from oppo_platform.accounts.models import Team
from oppo_platform.clock import Posix
from oppo_platform.cluster.disks import low_disks
from oppo_platform.cluster.models import CatalogueItem, Device, DeviceState, Node, Pool
from oppo_platform.cluster.selectors import live_nodes
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, Checkpoint, Run, Transition
from oppo_platform.scheduling import policy
from oppo_platform.scheduling.models import BackfillTerm, Reservation, TeamQuota, TeamShare
from oppo_platform.scheduling.usage import Unsettled, decayed_usage, unsettled
from oppo_platform.scheduling.waiting_runs import WaitingRuns, steps_per_s

STOPPING = frozenset({RunState.PAUSING, RunState.PREEMPTING, RunState.CANCELLING})
RUNNING = (
    "id", "run_id", "run__project__team_id", "run__priority", "run__preemptible", "run__state", "run__step", "run__total_steps",
    "run__elapsed_s", "run__max_runtime_s", "began_s",
)  # fmt: skip


def build_snapshot(now: datetime, kept: WaitingRuns | None = None) -> policy.Snapshot:
    """The snapshot for `policy.plan`. `kept`: the waiting runs of the process's earlier snapshots."""
    allocations = unsettled()
    used = decayed_usage(now, allocations)  # at once: what another process settles in between would count twice
    held = [allocation for allocation in allocations if allocation.end is None]
    nodes = _nodes({allocation.device_id: allocation.run_id for allocation in held})
    homes, preempted = {} if settings.OPPO_ARTIFACTS_SHARED else _homes(), _preempted()
    return policy.Snapshot(
        pools=_pools(),
        nodes=nodes,
        teams=_teams(used, now),
        waiting=_with_history((kept or WaitingRuns()).read(), homes, preempted),
        running=_running(nodes, held, preempted, now),
        reservations=_reservations(),
        settings=policy.PolicySettings(
            half_life_s=settings.OPPO_USAGE_HALF_LIFE_S,
            submit_penalty_s=settings.OPPO_SUBMIT_PENALTY_S,
            min_runtime_s=settings.OPPO_MIN_RUNTIME_S,
        ),
    )


def _pools() -> tuple[policy.Pool, ...]:
    return tuple(policy.Pool(pk, name) for pk, name in Pool.objects.order_by("pk").values_list("pk", "name"))


def _with_history(
    waiting: dict[int, policy.WaitingRun], homes: dict[int, tuple[int, str]], preempted: dict[int, int]
) -> tuple[policy.WaitingRun, ...]:
    """The runs with their homes and preemptions, which are in other tables."""
    for run_id in waiting.keys() & (homes.keys() | preempted.keys()):
        waiting[run_id] = replace(waiting[run_id], home=homes.get(run_id), preempted=preempted.get(run_id, 0))
    return tuple(waiting.values())


def _preempted() -> dict[int, int]:
    """Number of preemptions of each waiting or running run; a run that was resumed while pausing was not preempted."""
    asked = Transition.objects.filter(new=RunState.PREEMPTING, run__state__in=[RunState.QUEUED, *HOLDING_DEVICES])
    counted = asked.exclude(old=RunState.PAUSING).values_list("run_id").annotate(times=Count("id"))
    return dict(counted.order_by())


def _homes() -> dict[int, tuple[int, str]]:
    """The node of each waiting run's newest checkpoint, or of the one that it will start from."""
    queued = Run.objects.filter(state=RunState.QUEUED, begins_with__isnull=False)
    chosen = queued.values_list("pk", "begins_with__attempt__node_id", "begins_with__attempt__node__name")
    saved = Checkpoint.objects.filter(run__state=RunState.QUEUED)
    since = saved.filter(Q(run__begins_with__isnull=True) | Q(attempt__epoch__gt=F("run__begins_after")))
    newest = since.order_by("run", "-step", "-id").distinct("run")
    result = newest.values_list("run_id", "attempt__node_id", "attempt__node__name")
    return {run_id: (node_id, name) for rows in (chosen, result) for run_id, node_id, name in rows}


def _nodes(holders: dict[int, int]) -> tuple[policy.Node, ...]:
    """Every node with a pool, also unreachable ones: feasibility is judged on all of them."""
    devices: dict[int, list[policy.Device]] = defaultdict(list)
    there = Device.objects.exclude(state=DeviceState.GONE).order_by("node_id", "index")
    for pk, node_id, kind, model, state in there.values_list("pk", "node_id", "kind", "model", "state"):
        devices[node_id].append(policy.Device(pk, kind, model, state, holders.get(pk)))
    offers: dict[int, set[policy.Need]] = defaultdict(set)
    for node_id, kind, entry_id in CatalogueItem.objects.filter(problem="").values_list("node_id", "kind", "entry_id"):
        offers[node_id].add((kind, entry_id))
    fresh = set(live_nodes().values_list("pk", flat=True))
    full = set(low_disks().values_list("node_id", flat=True))
    rows = Node.objects.filter(pool__isnull=False).order_by("pk")
    return tuple(
        policy.Node(
            node_id=pk,
            name=name,
            pool_id=pool_id,
            devices=tuple(devices[pk]),
            offers=frozenset(offers[pk]),
            connected=pk in fresh,
            draining=drained_at is not None or wire_version not in SUPPORTED_VERSIONS,
            low_disk=pk in full,
        )
        for pk, name, pool_id, drained_at, wire_version in rows.values_list("pk", "name", "pool_id", "drained_at", "wire_version")
    )


def _teams(used: Mapping[int, float], now: datetime) -> tuple[policy.Team, ...]:
    quotas: dict[int, dict[int, policy.Quota]] = defaultdict(dict)
    for quota in TeamQuota.objects.all():
        quotas[quota.team_id][quota.pool_id] = policy.Quota(quota.nominal, quota.borrow_cap)
    weights = dict(TeamShare.objects.values_list("team_id", "weight"))
    return tuple(
        policy.Team(pk, name, weights.get(pk, 1.0), quotas[pk], used.get(pk, 0.0), now.timestamp())
        for pk, name in Team.objects.order_by("pk").values_list("pk", "name")
    )


def _running(
    nodes: tuple[policy.Node, ...], held: Sequence[Unsettled], preempted: dict[int, int], now: datetime
) -> tuple[policy.RunningRun, ...]:
    node_of = {device.device_id: node.node_id for node in nodes for device in node.devices}
    devices: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for allocation in held:
        if (node_id := node_of.get(allocation.device_id)) is not None:  # None: its node no longer reports the device
            devices[allocation.attempt_id][node_id].append(allocation.device_id)
    conditions = BackfillTerm.objects.filter(attempt__state__in=LIVE_ATTEMPT)
    terms = {
        attempt_id: policy.Backfill(for_run_id, until)
        for attempt_id, for_run_id, until in conditions.values_list("attempt_id", "for_run_id", Posix("until"))
    }
    live = Attempt.objects.filter(state__in=LIVE_ATTEMPT).order_by("run_id")
    rows = live.annotate(began_s=Posix(Coalesce("claimed_at", "created_at"))).values(*RUNNING)
    return tuple(
        _running_run(row, devices[row["id"]], terms.get(row["id"]), preempted.get(row["run_id"], 0), now.timestamp())
        for row in rows
    )


def _running_run(
    row: dict[str, Any], devices: dict[int, list[int]], term: policy.Backfill | None, preempted: int, now: float
) -> policy.RunningRun:
    pace = steps_per_s(row["run__step"], row["run__elapsed_s"])
    ends = []
    if pace is not None:
        ends.append(now + (row["run__total_steps"] - row["run__step"]) / pace)
    if row["run__max_runtime_s"] is not None:
        ends.append(max(now, row["began_s"] + row["run__max_runtime_s"]))
    return policy.RunningRun(
        run_id=row["run_id"],
        team_id=row["run__project__team_id"],
        devices={node_id: tuple(ids) for node_id, ids in devices.items()},
        priority=row["run__priority"],
        preemptible=row["run__preemptible"],
        started_at=row["began_s"],
        expected_end=min(ends, default=None),
        stopping=row["run__state"] in STOPPING,
        backfill=term,
        preempted=preempted,
    )


def _reservations() -> tuple[policy.Reservation, ...]:
    return tuple(
        policy.Reservation(
            run_id=r.run_id,
            pool_id=r.pool_id,
            devices={int(node): tuple(ids) for node, ids in r.devices.items()},
            start=_posix(r.start),
            cleared=r.cleared,
        )
        for r in Reservation.objects.order_by("run_id")
    )


def _posix(time: datetime | None) -> float | None:
    return time.timestamp() if time is not None else None
