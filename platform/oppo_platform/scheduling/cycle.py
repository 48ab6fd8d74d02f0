"""One cycle of the scheduler: fence what went silent, plan, allocate, ask for room, tell why, and send orders after the commit.

What to do is decided by `policy.plan`, from a picture of the database (`snapshot_of`); here it is done.

Guarantees: a transaction-scoped advisory lock lets one scheduler work at a time, and a second one is harmless; the partial unique
index on allocations makes double allocation impossible even without the lock; a launch order that is lost, repeated or late
does no harm, because claiming is a compare-and-set and every heartbeat repeats what is unclaimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import structlog
from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.db.models import F, Q

from oppo_contract.states import RunState
from oppo_contract.wire import SPOKEN
from oppo_platform import clock
from oppo_platform.cluster.models import DeviceState
from oppo_platform.runs.attempts import fence, latest_checkpoint
from oppo_platform.runs.models import LIVE_ATTEMPT, Attempt, AttemptState, Run
from oppo_platform.runs.steering import pause_overtime, preempt_run
from oppo_platform.runs.transitions import RunMoved, move_run
from oppo_platform.scheduling.dispatch import send_due
from oppo_platform.scheduling.models import Allocation, BackfillTerm, Dispatch, SchedulerBeat
from oppo_platform.scheduling.policy import Decisions, Placement, plan
from oppo_platform.scheduling.snapshot_of import snapshot_of
from oppo_platform.scheduling.usage import settle
from oppo_platform.scheduling.waiting import keep_order, keep_reservations, tell_waiting

log = structlog.get_logger(__name__)

LOCK_KEY = 0x4F50504F  # "OPPO"


@dataclass(frozen=True, slots=True)
class CycleResult:
    """What a cycle decided, and what it did."""

    decisions: Decisions
    placed: int
    preempted: int
    fenced: int
    sent: int

    def counts(self) -> dict[str, int]:
        """The numbers, for a log."""
        waiting = len(self.decisions.reasons)
        return {"placed": self.placed, "preempted": self.preempted, "fenced": self.fenced, "waiting": waiting, "sent": self.sent}


def run_cycle() -> CycleResult | None:
    """One cycle; None when another scheduler is in the middle of one."""
    with transaction.atomic():
        if not _try_lock():
            return None
        now = clock.now()
        _credit_downtime(now)
        fenced = _fence_expired(now) + _take_back_unclaimed(now)
        pause_overtime(now)
        settle(now)
        decisions = plan(snapshot_of(now), now.timestamp())
        placed = sum(_allocate(placement, now) for placement in decisions.placements)
        preempted = sum(preempt_run(victim.run_id, victim.text) for victim in decisions.preemptions)
        tell_waiting(decisions, now)
        keep_reservations(decisions)
        keep_order(decisions)
    return CycleResult(decisions, placed, preempted, fenced, sent=send_due())


def _try_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK_KEY])
        return bool(cursor.fetchone()[0])


def _credit_downtime(now: datetime) -> None:
    """While no scheduler ran, perhaps nobody could renew a lease either: extend them all by the gap."""
    beat, first = SchedulerBeat.objects.get_or_create(pk=1, defaults={"last_cycle_at": now})
    gap = now - beat.last_cycle_at
    if not first and gap > timedelta(seconds=settings.OPPO_DOWNTIME_S):
        Attempt.objects.filter(state__in=LIVE_ATTEMPT).update(lease_expires_at=F("lease_expires_at") + gap)
        log.info("leases credited", gap_s=round(gap.total_seconds(), 1))
    SchedulerBeat.objects.filter(pk=1).update(last_cycle_at=now)


def _fence_expired(now: datetime) -> int:
    expired = Attempt.objects.filter(state__in=LIVE_ATTEMPT, lease_expires_at__lte=now).select_related("node").order_by("pk")
    cause = "Nothing was heard of it on node {} until its lease ran out"
    return sum(fence(a.pk, "lease_lost", cause.format(a.node.name), "scheduler", DeviceState.UNKNOWN) for a in expired)


def _take_back_unclaimed(now: datetime) -> int:
    """What a node had not claimed when it fell silent, or came back with a version that is not spoken, waits for no lease."""
    silent = now - timedelta(seconds=settings.OPPO_NODE_FRESH_S)
    lost = Q(node__last_seen_at__lt=silent) | ~Q(node__wire_version__in=SPOKEN)
    unclaimed = Attempt.objects.filter(lost, state=AttemptState.ALLOCATED)
    cause = "Node {} fell silent before it began"
    return sum(
        fence(a.pk, "lease_lost", cause.format(a.node.name), "scheduler", DeviceState.READY)
        for a in unclaimed.select_related("node")
    )


def _allocate(placement: Placement, now: datetime) -> bool:
    """Make the attempt, its allocations and its launch order, and move the run; False when somebody was faster."""
    try:
        with transaction.atomic():
            run = Run.objects.select_for_update().get(pk=placement.run_id)
            if run.state != RunState.QUEUED:
                return False
            attempt = _new_attempt(run, placement, now)
            Allocation.objects.bulk_create(
                Allocation(attempt=attempt, device_id=device_id, created_at=now) for device_id in placement.device_ids
            )
            if placement.backfill is not None:
                until = datetime.fromtimestamp(placement.backfill.until, UTC)
                BackfillTerm.objects.create(attempt=attempt, for_run_id=placement.backfill.for_run_id, until=until)
            Dispatch.objects.create(attempt=attempt, queue=attempt.node.queue, created_at=now)
            move_run(run, RunState.ALLOCATED, f"Allocated on node {attempt.node.name}.", "scheduler")
    except (IntegrityError, RunMoved) as error:
        log.warning("allocation lost", run=placement.run_id, error=str(error))
        return False
    return True


def _new_attempt(run: Run, placement: Placement, now: datetime) -> Attempt:
    saved = latest_checkpoint(run)
    run.epochs += 1
    run.save(update_fields=["epochs"])
    return Attempt.objects.create(
        run=run,
        epoch=run.epochs,
        node_id=next(iter(placement.devices)),  # a run stays on one node
        created_at=now,
        lease_expires_at=now + timedelta(seconds=settings.OPPO_LEASE_S),
        resume_from=saved,
        start_step=saved.step if saved else 0,
    )
