"""Allocates a plan's placements: attempts with devices and launch orders, and the runs' moves, in a few statements for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import structlog
from django.conf import settings
from django.db import IntegrityError, transaction

from oppo_platform.cluster.models import Node
from oppo_platform.runs.attempts import latest_checkpoint, node_text
from oppo_platform.runs.launches import create_launches
from oppo_platform.runs.models import Allocation, Attempt, Run
from oppo_platform.runs.transitions import allocate_runs
from oppo_platform.scheduling.models import BackfillTerm, Dispatch
from oppo_platform.scheduling.policy import Placement

log = structlog.get_logger(__name__)


def allocate(placements: Sequence[Placement], now: datetime) -> int:
    """Allocate placements of different runs; those whose run or node has changed are left out. Returns the number allocated.

    If the database refuses them together, each is tried alone.
    """
    nodes = Node.objects.in_bulk({node_id for placement in placements for node_id in placement.devices})
    possible = [placement for placement in placements if placement.devices.keys() <= nodes.keys()]
    if not possible:
        return 0
    try:
        with transaction.atomic():
            return _allocate(possible, nodes, now)
    except IntegrityError as error:
        if len(possible) > 1:
            return sum(allocate([placement], now) for placement in possible)
        log.warning("allocation_conflict", run=possible[0].run_id, error=str(error))
        return 0


def _allocate(placements: Sequence[Placement], nodes: Mapping[int, Node], now: datetime) -> int:
    names = {p.run_id: node_text([nodes[node_id].name for node_id in p.devices]) for p in placements}
    moved = allocate_runs({run_id: f"Allocated on {name}." for run_id, name in names.items()})
    runs = Run.objects.defer("spec", "plan", "latest", "last_log_lines").in_bulk(moved)
    placed = [placement for placement in placements if placement.run_id in runs]
    attempts = [_new_attempt(runs[placement.run_id], placement, nodes, now) for placement in placed]
    Attempt.objects.bulk_create(attempts)
    allocated = list(zip(attempts, placed, strict=True))
    Allocation.objects.bulk_create(
        Allocation(attempt=attempt, device_id=device_id, created_at=now)
        for attempt, placement in allocated
        for device_id in placement.device_ids
    )
    BackfillTerm.objects.bulk_create(
        BackfillTerm(attempt=attempt, for_run_id=term.for_run_id, until=datetime.fromtimestamp(term.until, UTC))
        for attempt, placement in allocated
        if (term := placement.backfill) is not None
    )
    _order_launches(allocated, nodes, now)
    return len(attempts)


def _new_attempt(run: Run, placement: Placement, nodes: Mapping[int, Node], now: datetime) -> Attempt:
    saved = latest_checkpoint(run) if run.epochs > 1 or run.begins_with_id else None
    return Attempt(
        run=run,
        epoch=run.epochs,
        node=nodes[next(iter(placement.devices))],  # other nodes connect to the first one
        nodes=len(placement.devices),
        created_at=now,
        lease_expires_at=now + timedelta(seconds=settings.OPPO_LEASE_S),
        resume_from=saved,
        start_step=saved.step if saved else 0,
    )


def _order_launches(allocated: Sequence[tuple[Attempt, Placement]], nodes: Mapping[int, Node], now: datetime) -> None:
    """A launch order for every node; those of the other nodes are sent once the first node has claimed the attempt."""
    orders = [Dispatch(attempt=attempt, queue=attempt.node.queue, created_at=now) for attempt, _ in allocated]
    for attempt, placement in allocated:
        launches = create_launches(attempt, list(placement.devices)[1:]) if attempt.nodes > 1 else []
        orders += [Dispatch(attempt=attempt, launch=each, queue=nodes[each.node_id].queue, created_at=now) for each in launches]
    Dispatch.objects.bulk_create(orders)
