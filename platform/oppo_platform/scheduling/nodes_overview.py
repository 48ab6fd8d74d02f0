"""The cluster's nodes with their devices, and the run on each."""

from __future__ import annotations

from typing import Any

from django.db.models import Prefetch

from oppo_platform.accounts.models import User
from oppo_platform.cluster.disks import describe_low_disks
from oppo_platform.cluster.models import Device, DeviceState, Node
from oppo_platform.cluster.selectors import live_nodes, version_problem
from oppo_platform.runs.access import visible_runs
from oppo_platform.runs.models import Allocation


def nodes_overview(user: User) -> list[dict[str, Any]]:
    """Every node: `{id, name, hostname, pool, live, last_seen_at, drained_at, drain_reason, skew, low_disk, devices}`.

    `devices`: `[{id, index, kind, model, state, why, busy_share, holder, run}]`. `pool`: its name, None before a report.
    `holder` distinguishes devices of different runs and is never shown.
    `run` is `{id, name}` of the run on the device; for another team's run both are None; `run` itself is None if the
    device is free.
    """
    held = Allocation.objects.filter(released_at__isnull=True).select_related("attempt__run")
    devices = Device.objects.exclude(state=DeviceState.GONE).order_by("index")
    nodes = (
        Node.objects.select_related("pool")
        .order_by("name")
        .prefetch_related(
            Prefetch("devices", queryset=devices.prefetch_related(Prefetch("allocations", queryset=held, to_attr="held")))
        )
    )
    mine = set(visible_runs(user).filter(attempts__allocations__in=held).values_list("pk", flat=True))
    full = describe_low_disks()
    fresh = set(live_nodes().values_list("pk", flat=True))
    return [
        {
            "id": node.pk,
            "name": node.name,
            "hostname": node.hostname,
            "pool": node.pool.name if node.pool else None,
            "live": node.pk in fresh,
            "last_seen_at": node.last_seen_at.isoformat() if node.last_seen_at else None,
            "drained_at": node.drained_at.isoformat() if node.drained_at else None,
            "drain_reason": node.drain_reason,
            "skew": version_problem(node),
            "low_disk": full.get(node.pk, ""),
            "devices": [_device(device, mine) for device in node.devices.all()],
        }
        for node in nodes
    ]


def _device(device: Any, mine: set[int]) -> dict[str, Any]:
    run = device.held[0].attempt.run if device.held else None
    shown = None if run is None else {"id": run.pk, "name": run.name} if run.pk in mine else {"id": None, "name": None}
    return {
        "id": device.pk,
        "index": device.index,
        "kind": device.kind,
        "model": device.model,
        "state": device.state,
        "busy_share": device.busy_share,
        "holder": run.pk if run else None,
        "why": device.health,
        "run": shown,
    }
