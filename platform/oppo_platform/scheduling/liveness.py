"""Expires silent nodes and attempts at the beginning of each cycle, in its transaction.

Guarantee: downtime of the control plane itself fences no attempt, because it extends every deadline.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db.models import F, Q, QuerySet

from oppo_contract.wire import SUPPORTED_VERSIONS
from oppo_platform.cluster.models import DeviceState
from oppo_platform.runs.attempts import fence
from oppo_platform.runs.launches import launches_due
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, AttemptState, Launch, LaunchState
from oppo_platform.scheduling.models import SchedulerBeat

log = structlog.get_logger(__name__)

SILENT = "The worker on node {} sent no heartbeat until the lease expired"
FELL_SILENT = "Node {} stopped sending heartbeats before the run started"


def credit_downtime(now: datetime) -> datetime:
    """Extend all deadlines by the time without a scheduler, in which leases may not have been renewable.

    Returns the time of the last cycle; `now` if this is the first.
    """
    beat, first = SchedulerBeat.objects.defer("order").get_or_create(pk=1, defaults={"last_cycle_at": now})
    gap = now - beat.last_cycle_at
    if not first and gap > timedelta(seconds=settings.OPPO_DOWNTIME_S):
        live = Attempt.objects.filter(state__in=LIVE_ATTEMPT)
        live.update(lease_expires_at=F("lease_expires_at") + gap, rendezvous_by=F("rendezvous_by") + gap)
        Launch.objects.filter(state=LaunchState.CLAIMED).update(lease_expires_at=F("lease_expires_at") + gap)
        log.info("leases credited", gap_s=round(gap.total_seconds(), 1))
    return beat.last_cycle_at


def fence_expired(now: datetime) -> int:
    """Fence attempts with an expired lease on one node. Returns their number."""
    heads = Attempt.objects.filter(state__in=LIVE_ATTEMPT, lease_expires_at__lte=now)
    others = Launch.objects.filter(state=LaunchState.CLAIMED, lease_expires_at__lte=now)
    return _fence_lost(heads, others, SILENT, DeviceState.UNKNOWN)


def release_unclaimed(now: datetime) -> int:
    """Take back attempts that a silent node, or one with an unsupported version, has not claimed; without waiting for a lease."""
    heads = Attempt.objects.filter(_lost(now), state=AttemptState.ALLOCATED)
    others = Launch.objects.filter(_lost(now), attempt__state=AttemptState.ALLOCATED)
    return _fence_lost(heads, others, FELL_SILENT, DeviceState.READY)


def _fence_lost(heads: QuerySet[Attempt], others: QuerySet[Launch], cause: str, devices: DeviceState) -> int:
    lost = [
        *heads.order_by("pk").values_list("pk", "node_id", "node__name"),
        *others.order_by("pk").values_list("attempt_id", "node_id", "node__name"),
    ]
    return sum(
        fence(attempt_id, "lease_lost", cause.format(name), "scheduler", devices, node_id) for attempt_id, node_id, name in lost
    )


def fence_absent(now: datetime) -> int:
    """Fence attempts whose further nodes did not join before the deadline, or are unreachable."""
    absent = launches_due().filter(Q(attempt__rendezvous_by__lte=now) | _lost(now)).order_by("pk")
    return sum(
        fence(attempt_id, "absent", _absence(name, due, now), "scheduler", DeviceState.READY, node_id)
        for attempt_id, node_id, name, due in absent.values_list("attempt_id", "node_id", "node__name", "attempt__rendezvous_by")
    )


def _absence(node: str, due: datetime, now: datetime) -> str:
    if due > now:
        return f"Node {node} stopped sending heartbeats before it joined the other nodes"
    return f"Node {node} did not join the other nodes within {settings.OPPO_RENDEZVOUS_S:g} s"


def _lost(now: datetime) -> Q:
    """Nodes that are silent or have an unsupported version."""
    silent = now - timedelta(seconds=settings.OPPO_NODE_FRESH_S)
    return Q(node__last_seen_at__lt=silent) | ~Q(node__wire_version__in=SUPPORTED_VERSIONS)
