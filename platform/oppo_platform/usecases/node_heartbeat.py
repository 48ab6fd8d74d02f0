"""The heartbeat of a node's agent: devices and catalogue in, orders out.

The response alone is sufficient for operation: Celery messages only shorten the wait.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction

from oppo_contract import wire
from oppo_platform import clock
from oppo_platform.cluster import services as cluster
from oppo_platform.cluster.disks import update_disks
from oppo_platform.cluster.models import DeviceState, Node
from oppo_platform.notify import wake_scheduler
from oppo_platform.runs.attempts import fence
from oppo_platform.runs.launches import launches_due
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, AttemptState, Launch, LaunchState
from oppo_platform.storage.artifact_deletion import deletion_orders, record_results


@transaction.atomic
def heartbeat(node_id: int, report: wire.NodeHeartbeat) -> wire.NodeOrders:
    """Store the node's report; reply with attempts to start and to stop, and whether the catalogue is requested."""
    now = clock.now()
    node, changed = cluster.update_node(node_id, report, now)
    # Before the attempts are read: a concurrent fence holds their locks, and attempts that it ended must not count as live.
    devices = cluster.lock_devices(node)
    live = list(Attempt.objects.filter(node=node, state__in=LIVE_ATTEMPT).order_by("pk"))
    joined = Launch.objects.filter(node=node).exclude(state=LaunchState.ENDED)
    owned = {(attempt.pk, attempt.epoch) for attempt in live} | set(joined.values_list("attempt_id", "attempt__epoch"))
    stop = [r for r in report.attempts if (r.attempt_id, r.epoch) not in owned]
    changed |= cluster.update_devices(node, devices, report.devices, clear=not stop)
    changed |= update_disks(node, report.disks, now)
    if changed:
        wake_scheduler()
    record_results(node, report.deleted)
    return wire.NodeOrders(
        unclaimed=[wire.LaunchOrder(attempt_id=pk, epoch=epoch) for pk, epoch in _unclaimed(node, live)],
        stop=[wire.LaunchOrder(attempt_id=r.attempt_id, epoch=r.epoch) for r in stop],
        catalogue_wanted=node.catalogue_at is None,
        delete=deletion_orders(node),
    )


def _unclaimed(node: Node, live: list[Attempt]) -> list[tuple[int, int]]:
    """Attempts, and launches of attempts whose first node has joined, that the node may claim, each with its epoch."""
    if node.wire_version not in wire.SUPPORTED_VERSIONS:
        return []
    first = [(a.pk, a.epoch) for a in live if a.state == AttemptState.ALLOCATED]
    return [*first, *launches_due().filter(node=node).order_by("pk").values_list("attempt_id", "attempt__epoch")]


def fence_orphans(node_id: int, reported: set[int]) -> int:
    """Fence attempts that the node's own agent no longer runs: its machine was restarted, or a supervisor was killed.

    Requires both the agent's report and `OPPO_ORPHAN_GRACE_S` of silence of the supervisor. Returns their number.
    """
    silent_since = clock.now() - timedelta(seconds=settings.OPPO_ORPHAN_GRACE_S)
    orphans = Attempt.objects.filter(
        node_id=node_id, state__in=(AttemptState.CLAIMED, AttemptState.RUNNING), seen_at__lt=silent_since
    ).exclude(pk__in=reported)
    joined = Launch.objects.filter(node_id=node_id, state=LaunchState.CLAIMED, seen_at__lt=silent_since)
    given_up = 0
    for attempt_id in [
        *orphans.order_by("pk").values_list("pk", flat=True),
        *joined.exclude(attempt__in=reported).order_by("pk").values_list("attempt", flat=True),
    ]:
        with transaction.atomic():
            cause = "The worker no longer runs it: the machine or the supervisor restarted"
            given_up += fence(attempt_id, "orphaned", cause, "scheduler", DeviceState.READY, node_id)
    return given_up
