"""Nodes: joining, and devices and catalogue of their heartbeats. The whole heartbeat is `usecases.node_heartbeat`."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction

from oppo_contract import wire
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.cluster.models import CatalogueItem, Device, DeviceState, JoinToken, Node
from oppo_platform.cluster.pools import get_or_create_pool
from oppo_platform.notify import wake_scheduler
from oppo_platform.tokens import new_token, parse_token, same_digest

JOIN_TOKEN_HOURS = 24


@transaction.atomic
def create_join_token(hours: float = JOIN_TOKEN_HOURS) -> str:
    """A token with which workers can join for `hours`; shown once."""
    token, now = new_token("join"), clock.now()
    JoinToken.objects.create(prefix=token.prefix, digest=token.digest, created_at=now, expires_at=now + timedelta(hours=hours))
    audit.record(None, audit.SHELL, "node.token", token.prefix, hours=hours)
    return token.text


def is_join_token(text: str) -> bool:
    """Whether a worker may join with it now."""
    parsed = parse_token(text, "join")
    if parsed is None:
        return False
    result = JoinToken.objects.filter(prefix=parsed[0], revoked_at__isnull=True, expires_at__gt=clock.now()).first()
    return result is not None and same_digest(result.digest, parsed[1])


def node_by_token(text: str) -> Node | None:
    """The node of a token."""
    parsed = parse_token(text, "node")
    node = Node.objects.filter(token_prefix=parsed[0]).first() if parsed else None
    return node if parsed and node and same_digest(node.token_digest, parsed[1]) else None


@transaction.atomic
def join(request: wire.Join) -> wire.Joined:
    """Register the node, or give a known name a new token; the old one becomes invalid."""
    token, now = new_token("node"), clock.now()
    fields = request.model_dump(include={"hostname", "cpus", "memory_bytes", "wire_version"}) | {
        "token_prefix": token.prefix,
        "token_digest": token.digest,
        "queue": f"oppo.node.{request.name}",
        "joined_at": now,
        "catalogue_at": None,
    }
    node, _ = Node.objects.update_or_create(name=request.name, defaults=fields)
    audit.record(None, f"node:{node.name}", "node.join", node.name, host=request.hostname)
    return wire.Joined(
        node_id=node.pk,
        node_token=token.text,
        queue=node.queue,
        broker_url=settings.WORKER_BROKER_URL,
        artifact_root=settings.OPPO_ARTIFACT_ROOT,
    )


def update_node(node_id: int, heartbeat: wire.NodeHeartbeat, now: datetime) -> tuple[Node, bool]:
    """Lock the node; store its version, catalogue and pool. Inside the heartbeat's transaction.

    Returns:
        The node, and whether it was silent or has a new catalogue.
    """
    # Not its key: a transaction that writes an attempt on the node need not wait, and holds devices that we would wait for.
    node = Node.objects.select_for_update(no_key=True).get(pk=node_id)
    fresh = node.last_seen_at is not None and now - node.last_seen_at < timedelta(seconds=settings.OPPO_NODE_FRESH_S)
    node.last_seen_at, node.wire_version = now, heartbeat.wire_version
    node.clock_skew_s = heartbeat.time - now.timestamp() if heartbeat.time is not None else None
    if heartbeat.catalogue is not None:
        _replace_catalogue(node, heartbeat.catalogue)
        node.catalogue_at = now
    if node.pool_id is None and heartbeat.devices:
        node.pool = get_or_create_pool(heartbeat.devices, now)
    node.save(update_fields=["last_seen_at", "wire_version", "clock_skew_s", "catalogue_at", "pool"])
    return node, heartbeat.catalogue is not None or not fresh


def lock_devices(node: Node) -> dict[int, Device]:
    """The node's devices by index, locked until the transaction ends."""
    return {device.index: device for device in Device.objects.select_for_update().filter(node=node).order_by("pk")}


def _device_fields(report: wire.DeviceReport, device: Device | None) -> dict[str, Any]:
    """Stored fields of a device; a card that its driver has lost keeps its model and memory."""
    fields = report.model_dump(include={"kind", "memory_bytes", "health"}) | {"model": report.model[:200]}
    if device is not None and not report.model:
        fields |= {"model": device.model, "memory_bytes": device.memory_bytes}
    return fields | {"busy_share": None if report.busy_share is None else round(report.busy_share, 2)}


def update_devices(node: Node, known: dict[int, Device], reports: list[wire.DeviceReport], clear: bool) -> bool:
    """Store changes; `clear`: no fenced attempt is left on the node. Returns whether a device became allocatable.

    `known`: the node's devices by index, locked.
    """
    allocatable = False
    for report in reports:
        device = known.pop(report.index, None)
        fields = _device_fields(report, device)
        if device is None:
            state = device_state(DeviceState.READY, report.health, "", clear=True)
            Device.objects.create(node=node, index=report.index, state=state, **fields)
            allocatable = True
            continue
        waived = device.waived if report.health else ""  # a waiver ends once the device has been healthy
        state = device_state(device.state, report.health, waived, clear=clear)
        fields |= {"state": state, "waived": waived}
        if any(getattr(device, name) != value for name, value in fields.items()):
            Device.objects.filter(pk=device.pk).update(**fields)
        allocatable |= state == DeviceState.READY != device.state
    Device.objects.filter(pk__in=[device.pk for device in known.values()]).update(state=DeviceState.GONE)
    return allocatable


def device_state(old: str, health: str, waived: str, *, clear: bool) -> DeviceState:
    """The state of a device after its node's report.

    Args:
        old: its previous state.
        health: the problem that the node reports.
        waived: the problem in spite of which an administrator put it back.
        clear: no fenced attempt is left on the node.
    """
    if health and health != waived:
        return DeviceState.QUARANTINED
    waits = old != DeviceState.READY and not clear  # also after an absence: its engine may still run
    return DeviceState.UNKNOWN if waits else DeviceState.READY


@transaction.atomic
def put_back(device_id: int, actor: User | str = audit.SHELL) -> Device:
    """Put a quarantined device back into service in spite of its reported problem; a different problem quarantines it again."""
    device = Device.objects.select_for_update(of=("self",)).select_related("node").get(pk=device_id)
    if device.state == DeviceState.QUARANTINED:
        device.state, device.waived = DeviceState.READY, device.health
        device.save(update_fields=["state", "waived"])
        audit.record(None, actor, "device.put_back", str(device), health=device.health)
        wake_scheduler()
    return device


def _replace_catalogue(node: Node, entries: list[wire.CatalogueEntry]) -> None:
    CatalogueItem.objects.filter(node=node).delete()
    rows = {(e.kind, e.id): CatalogueItem(node=node, entry_id=e.id, **e.model_dump(exclude={"id"})) for e in entries}
    CatalogueItem.objects.bulk_create(rows.values())
