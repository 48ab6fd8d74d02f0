"""What the scheduler does about those of whom nothing is heard: at the beginning of each cycle, in its transaction.

Guarantee: a control plane that was away itself fences nobody for it, because every deadline is put off by what it missed.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import structlog
from django.conf import settings
from django.db.models import F, Q

from oppo_contract.wire import SUPPORTED_VERSIONS
from oppo_platform.cluster.models import DeviceState
from oppo_platform.runs.attempts import fence
from oppo_platform.runs.launches import launches_due
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, AttemptState, Launch, LaunchState
from oppo_platform.scheduling.models import SchedulerBeat

log = structlog.get_logger(__name__)

SILENT = "The worker on node {} sent no heartbeat until the lease expired"
FELL_SILENT = "Node {} stopped sending heartbeats before the run started"


def credit_downtime(now: datetime) -> None:
    """While no scheduler ran, perhaps nobody could renew a lease or claim a launch either: put all deadlines off by the gap."""
    beat, first = SchedulerBeat.objects.get_or_create(pk=1, defaults={"last_cycle_at": now})
    gap = now - beat.last_cycle_at
    if not first and gap > timedelta(seconds=settings.OPPO_DOWNTIME_S):
        live = Attempt.objects.filter(state__in=LIVE_ATTEMPT)
        live.update(lease_expires_at=F("lease_expires_at") + gap, rendezvous_by=F("rendezvous_by") + gap)
        Launch.objects.filter(state=LaunchState.CLAIMED).update(lease_expires_at=F("lease_expires_at") + gap)
        log.info("leases credited", gap_s=round(gap.total_seconds(), 1))
    SchedulerBeat.objects.filter(pk=1).update(last_cycle_at=now)


def fence_expired(now: datetime) -> int:
    """Give up attempts of which one node's lease ran out. Returns how many."""
    heads = Attempt.objects.filter(state__in=LIVE_ATTEMPT, lease_expires_at__lte=now)
    others = Launch.objects.filter(state=LaunchState.CLAIMED, lease_expires_at__lte=now)
    expired = [
        *heads.order_by("pk").values_list("pk", "node_id", "node__name"),
        *others.order_by("pk").values_list("attempt_id", "node_id", "node__name"),
    ]
    return sum(
        fence(attempt_id, "lease_lost", SILENT.format(name), "scheduler", DeviceState.UNKNOWN, node_id)
        for attempt_id, node_id, name in expired
    )


def take_back_unclaimed(now: datetime) -> int:
    """What a node had not claimed when it fell silent, or came back with a version that is not spoken, waits for no lease."""
    unclaimed = Attempt.objects.filter(_lost(now), state=AttemptState.ALLOCATED)
    further = Launch.objects.filter(_lost(now), attempt__state=AttemptState.ALLOCATED)
    lost = [
        *unclaimed.order_by("pk").values_list("pk", "node_id", "node__name"),
        *further.order_by("pk").values_list("attempt_id", "node_id", "node__name"),
    ]
    return sum(
        fence(attempt_id, "lease_lost", FELL_SILENT.format(name), "scheduler", DeviceState.READY, node_id)
        for attempt_id, node_id, name in lost
    )


def give_up_absent(now: datetime) -> int:
    """Give up attempts whose first node has waited for another one until the deadline, or for one that is away."""
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
    """Nodes that are silent, or speak another version."""
    silent = now - timedelta(seconds=settings.OPPO_NODE_FRESH_S)
    return Q(node__last_seen_at__lt=silent) | ~Q(node__wire_version__in=SUPPORTED_VERSIONS)
