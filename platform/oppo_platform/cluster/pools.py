"""Pools, and draining of nodes. Each service is one transaction; the scheduler is notified after the commit."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from django.db import transaction

from oppo_contract.wire import DeviceReport
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.cluster.models import Node, Pool
from oppo_platform.notify import wake_scheduler

LONGEST_NAME, LONGEST_REASON = 120, 300


class PoolError(ValueError):
    """An invalid request about pools or nodes; the message says why."""


def get_or_create_pool(devices: list[DeviceReport], now: datetime) -> Pool:
    """The pool for a node with these devices: named after its most frequent model, created if missing."""
    model = Counter(device.model for device in devices).most_common(1)[0][0]
    name = " ".join(model.split())[:LONGEST_NAME] or devices[0].kind
    return Pool.objects.get_or_create(name=name, defaults={"created_at": now})[0]


@transaction.atomic
def rename_pool(pool_id: int, name: str, actor: User | str = audit.SHELL) -> Pool:
    """Rename a pool. Raises `PoolError` for a name that is empty, too long or taken."""
    name = _checked_name(name)
    if Pool.objects.filter(name=name).exclude(pk=pool_id).exists():
        raise PoolError(f"A pool named {name} already exists.")
    pool = Pool.objects.select_for_update().get(pk=pool_id)
    audit.record(None, actor, "pool.rename", pool.name, new=name)
    pool.name = name
    pool.save(update_fields=["name"])
    return pool


@transaction.atomic
def move_node(node_id: int, pool_name: str, actor: User | str = audit.SHELL) -> Node:
    """Move a node to a pool, created if missing. Its runs continue. Raises `PoolError` for a name that is empty or too long."""
    pool_name = _checked_name(pool_name)
    node = Node.objects.select_for_update().get(pk=node_id)
    node.pool = Pool.objects.get_or_create(name=pool_name, defaults={"created_at": clock.now()})[0]
    node.save(update_fields=["pool"])
    audit.record(None, actor, "node.move", node.name, pool=pool_name)
    wake_scheduler()
    return node


def _checked_name(text: str) -> str:
    name = " ".join(text.split())
    if not name or len(name) > LONGEST_NAME:
        raise PoolError(f"A pool name must have 1 to {LONGEST_NAME} characters.")
    return name


@transaction.atomic
def drain(node_id: int, reason: str, actor: User | str = audit.SHELL) -> Node:
    """Give the node no new work; its runs continue. Repeated, it keeps its time and takes the new reason."""
    node = Node.objects.select_for_update().get(pk=node_id)
    node.drained_at = node.drained_at or clock.now()
    node.drain_reason = " ".join(reason.split())[:LONGEST_REASON]
    node.save(update_fields=["drained_at", "drain_reason"])
    audit.record(None, actor, "node.drain", node.name, reason=node.drain_reason)
    wake_scheduler()
    return node


@transaction.atomic
def undrain(node_id: int, actor: User | str = audit.SHELL) -> Node:
    """Let the node have work again."""
    node = Node.objects.select_for_update().get(pk=node_id)
    node.drained_at, node.drain_reason = None, ""
    node.save(update_fields=["drained_at", "drain_reason"])
    audit.record(None, actor, "node.undrain", node.name)
    wake_scheduler()
    return node
