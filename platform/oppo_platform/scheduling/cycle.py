"""One scheduler cycle: fence silent attempts, plan, allocate, preempt, store reasons, and send orders after the commit.

`policy.plan` decides on a snapshot of the database (`build_snapshot`); this module applies the decisions.

Guarantees: a transaction-scoped advisory lock excludes concurrent schedulers, so a second one is harmless; the partial unique
index on allocations makes double allocation impossible even without the lock; a lost, repeated or late launch order is harmless,
because claiming is a compare-and-set and every heartbeat repeats unclaimed orders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import structlog
from django.conf import settings
from django.db import IntegrityError, connection, transaction

from oppo_contract.states import RunState
from oppo_platform import clock
from oppo_platform.cluster.models import Node
from oppo_platform.runs.attempts import latest_checkpoint, node_names
from oppo_platform.runs.launches import create_launches
from oppo_platform.runs.lifecycle import pause_overtime, preempt_run
from oppo_platform.runs.models import Allocation, Attempt, Run
from oppo_platform.runs.transitions import RunMoved, move_run
from oppo_platform.scheduling.build_snapshot import build_snapshot, waiting_runs
from oppo_platform.scheduling.dispatch import send_due
from oppo_platform.scheduling.kept_rows import KeptRows
from oppo_platform.scheduling.liveness import credit_downtime, fence_absent, fence_expired, release_unclaimed
from oppo_platform.scheduling.models import BackfillTerm, Dispatch
from oppo_platform.scheduling.policy import Decisions, Placement, WaitingRun, plan
from oppo_platform.scheduling.usage import settle
from oppo_platform.scheduling.wait_reasons import StoredReason, store_order, store_reasons, store_reservations, stored_reasons

log = structlog.get_logger(__name__)

LOCK_KEY = 0x4F50504F  # "OPPO"


@dataclass(frozen=True, slots=True)
class CycleResult:
    """Decisions of a cycle, and what was applied."""

    decisions: Decisions
    placed: int
    preempted: int
    fenced: int
    sent: int

    def counts(self) -> dict[str, int]:
        """The numbers, for a log."""
        waiting = len(self.decisions.reasons)
        return {"placed": self.placed, "preempted": self.preempted, "fenced": self.fenced, "waiting": waiting, "sent": self.sent}


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows that a scheduler process keeps between its cycles."""

    waiting: KeptRows[WaitingRun] = field(default_factory=waiting_runs)
    reasons: KeptRows[StoredReason] = field(default_factory=stored_reasons)


def run_cycle(kept: Kept | None = None) -> CycleResult | None:
    """One cycle; None if another scheduler's cycle is running. `kept`: of the process's earlier cycles."""
    kept = kept or Kept()
    with transaction.atomic():
        if not _try_lock():
            return None
        now = clock.now()
        credit_downtime(now)
        fenced = fence_expired(now) + release_unclaimed(now) + fence_absent(now)
        pause_overtime(now)
        settle(now)
        decisions = plan(build_snapshot(now, kept.waiting), now.timestamp())
        nodes = Node.objects.in_bulk({node_id for placement in decisions.placements for node_id in placement.devices})
        placed = sum(_allocate(placement, nodes, now) for placement in decisions.placements)
        preempted = sum(preempt_run(victim.run_id, victim.text) for victim in decisions.preemptions)
        store_reasons(decisions, now, kept.reasons)
        store_reservations(decisions)
        store_order(decisions)
    return CycleResult(decisions, placed, preempted, fenced, sent=send_due())


def _try_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK_KEY])
        return bool(cursor.fetchone()[0])


def _allocate(placement: Placement, nodes: Mapping[int, Node], now: datetime) -> bool:
    """Create the attempt, its allocations and its launch order, and move the run; False if the run or a node has changed."""
    if not placement.devices.keys() <= nodes.keys():
        return False
    try:
        with transaction.atomic():
            run = Run.objects.select_for_update().get(pk=placement.run_id)
            if run.state != RunState.QUEUED:
                return False
            attempt = _new_attempt(run, placement, nodes, now)
            Allocation.objects.bulk_create(
                Allocation(attempt=attempt, device_id=device_id, created_at=now) for device_id in placement.device_ids
            )
            if placement.backfill is not None:
                until = datetime.fromtimestamp(placement.backfill.until, UTC)
                BackfillTerm.objects.create(attempt=attempt, for_run_id=placement.backfill.for_run_id, until=until)
            _order_launches(attempt, placement, nodes, now)
            move_run(run, RunState.ALLOCATED, f"Allocated on {node_names(attempt)}.", "scheduler")
    except (IntegrityError, RunMoved) as error:
        log.warning("allocation_conflict", run=placement.run_id, error=str(error))
        return False
    return True


def _new_attempt(run: Run, placement: Placement, nodes: Mapping[int, Node], now: datetime) -> Attempt:
    saved = latest_checkpoint(run) if run.epochs or run.begins_with_id else None
    run.epochs += 1
    run.save(update_fields=["epochs"])
    return Attempt.objects.create(
        run=run,
        epoch=run.epochs,
        node=nodes[next(iter(placement.devices))],  # other nodes connect to the first one
        nodes=len(placement.devices),
        created_at=now,
        lease_expires_at=now + timedelta(seconds=settings.OPPO_LEASE_S),
        resume_from=saved,
        start_step=saved.step if saved else 0,
    )


def _order_launches(attempt: Attempt, placement: Placement, nodes: Mapping[int, Node], now: datetime) -> None:
    """A launch order for every node; those of the other nodes are sent once the first node has claimed the attempt."""
    Dispatch.objects.create(attempt=attempt, queue=attempt.node.queue, created_at=now)
    if attempt.nodes > 1:
        launches = create_launches(attempt, list(placement.devices)[1:])
        Dispatch.objects.bulk_create(
            Dispatch(attempt=attempt, launch=launch, queue=nodes[launch.node_id].queue, created_at=now) for launch in launches
        )
