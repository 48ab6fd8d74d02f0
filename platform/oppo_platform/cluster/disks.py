"""Nodes' disks that run full: stored with heartbeats, and shown as a reason why a node gets no work."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import QuerySet

from oppo_contract import wire
from oppo_contract.byte_sizes import size
from oppo_platform import clock
from oppo_platform.cluster.models import Disk, Node

# Hysteresis: a low disk counts as low until a tenth more than the limit is free.
RECOVERED = 1.1
# Figures are written after a change of this share of the disk, or at this age; and are valid this long.
MOVED, OLD_S, BELIEVED_S = 0.01, 60.0, 300.0
WORDS = {"artifacts": "for checkpoints", "outbox": "for events"}


def update_disks(node: Node, reports: list[wire.DiskReport], now: datetime) -> bool:
    """Store changes of a node's disks. Returns whether one ran full or has room again."""
    known = {disk.what: disk for disk in Disk.objects.filter(node=node)} if reports else {}
    changed = False
    for report in reports:
        old = known.get(report.what)
        was_low = old is not None and old.low
        low = is_low(report.free_bytes, was=was_low)
        if old is not None and old.low == low and not _moved(old, report, now):
            continue
        values = {**report.model_dump(exclude={"what"}), "low": low, "told_at": now}
        Disk.objects.update_or_create(node=node, what=report.what, defaults=values)
        changed |= low != was_low
    return changed


def is_low(free_bytes: int, *, was: bool) -> bool:
    """Whether too little is free for new work; `was`: the previous result."""
    return free_bytes < settings.OPPO_LOW_DISK_BYTES * (RECOVERED if was else 1.0)


def _moved(old: Disk, report: wire.DiskReport, now: datetime) -> bool:
    return (
        abs(old.free_bytes - report.free_bytes) > MOVED * report.total_bytes
        or old.total_bytes != report.total_bytes
        or old.path != report.path
        or now - old.told_at > timedelta(seconds=OLD_S)
    )


def low_disks() -> QuerySet[Disk]:
    """Disks that are low, as far as is known."""
    return Disk.objects.filter(low=True, told_at__gte=clock.now_in_query() - timedelta(seconds=BELIEVED_S))


def describe_low_disks() -> dict[int, str]:
    """By node, a description of its low disks: `1.2 GiB are left for checkpoints`."""
    reason: dict[int, list[str]] = defaultdict(list)
    for disk in low_disks().order_by("node", "what"):
        reason[disk.node_id].append(f"{size(disk.free_bytes)} left {WORDS.get(disk.what, disk.what)}")
    return {node_id: "low on disk: " + ", ".join(words) for node_id, words in reason.items()}
