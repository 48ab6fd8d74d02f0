"""Queries of the queue: waiting runs, reasons, places, and expected starts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from typing_extensions import TypedDict

from oppo_contract.states import RunState
from oppo_platform.accounts.models import User
from oppo_platform.runs.access import manageable, visible_runs
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import RunSummary, run_summary, summaries
from oppo_platform.scheduling.models import Reservation, SchedulerBeat, WaitingReason


class Waiting(TypedDict):
    """A waiting run of the user's teams. `place` counts all teams' runs from 1; None: not scheduled yet."""

    run: RunSummary
    place: int | None
    code: str
    text: str
    sooner: str
    estimated_start: datetime | None
    priority: int
    may_steer: bool
    kept: int


class Queue(TypedDict):
    """Some of the user's waiting runs in order, their total number, and the time of the last plan."""

    items: list[Waiting]
    waiting: int
    planned_at: datetime | None


@dataclass(frozen=True, slots=True)
class QueueOrder:
    """Ids of the user's waiting runs in order, and the order of all teams' runs."""

    user: User
    ids: list[int]
    place: dict[int, int]
    planned_at: datetime | None


def queue_order(user: User) -> QueueOrder:
    """Waiting runs in order. Reads ids only: thousands may wait, of which one page is shown."""
    beat = SchedulerBeat.objects.first()
    place = {run_id: number for number, run_id in enumerate(beat.order if beat else [], start=1)}
    rows = visible_runs(user).filter(state=RunState.QUEUED).values_list("pk", "priority", "queued_at")
    ordered = sorted(rows, key=lambda row: (place.get(row[0], len(place) + 1), -row[1], row[2], row[0]))
    return QueueOrder(user, [pk for pk, _, _ in ordered], place, beat.last_cycle_at if beat else None)


def waiting_runs(queue_order: QueueOrder, ids: list[int]) -> Queue:
    """Some of the waiting runs with their reasons; runs that have started meanwhile are left out."""
    turn = {run_id: number for number, run_id in enumerate(ids)}
    rows = visible_runs(queue_order.user, summaries()).filter(pk__in=ids, state=RunState.QUEUED).select_related("waiting")
    runs = sorted(rows, key=lambda run: turn[run.pk])
    steered = manageable(queue_order.user, runs)
    kept = {r.run_id: sum(map(len, r.devices.values())) for r in Reservation.objects.filter(run__in=ids)}
    return Queue(
        items=[_waiting(run, queue_order.place.get(run.pk), run.pk in steered, kept.get(run.pk, 0)) for run in runs],
        waiting=Run.objects.filter(state=RunState.QUEUED).count(),
        planned_at=queue_order.planned_at,
    )


def _waiting(run: Run, place: int | None, steered: bool, kept: int) -> Waiting:
    reason: WaitingReason | None = getattr(run, "waiting", None)
    return Waiting(
        run=run_summary(run),
        place=place,
        code=reason.code if reason else "",
        text=reason.text if reason else run.reason,
        sooner=reason.sooner if reason else "",
        estimated_start=reason.estimated_start if reason else None,
        priority=run.priority,
        may_steer=steered,
        kept=kept,
    )
