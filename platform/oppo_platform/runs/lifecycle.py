"""Requests about a run: pause, resume, cancel, preempt, change priority, extend the time limit, archive.

    request → signal (with the next heartbeat) → checkpoint → acknowledged by the outcome

Guarantees. Each function is one transaction: run and attempt are locked (in this order), the move is a compare-and-set along
the table of transitions, and a `Transition` or `Change` row is added. An unclaimed attempt has no engine, ends at once and frees
its devices. A request has a deadline on the database's clock, in `Attempt.stop_by`; heartbeats carry the remaining time, and the
supervisor kills the engine after it. If the supervisor is silent, too, or sends no outcome, its lease expires. A stop request
cannot be withdrawn; a later request only changes the run's next state: pausing → paused, preempting → queued, cancelling →
cancelled, however the engine stopped.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import DurationField, ExpressionWrapper, F, Sum, Value
from django.db.models.functions import Coalesce

from oppo_contract.states import ENDED, RunState
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.notify import run_changed, wake_scheduler
from oppo_platform.runs.allowed_actions import refusal
from oppo_platform.runs.attempts import end_attempt
from oppo_platform.runs.models import LIVE_ATTEMPT, PRIORITIES, Attempt, AttemptState, Change, Run
from oppo_platform.runs.transitions import move_run

S = RunState
LONGEST_EXTENSION_H = 24 * 365.0


class NotPossible(Exception):
    """The request is not allowed in the run's state, or has a bad value; the message says why."""


@transaction.atomic
def cancel_run(run_id: int, actor: str) -> Run:
    """End a run for good; idempotent."""
    run, attempt = _locked(run_id)
    if run.state in ENDED or run.state == S.CANCELLING:
        return run
    reason = f"Cancelled by {_name(actor)}."
    _stop(run, attempt, settings.OPPO_CANCEL_DEADLINE_S, (S.CANCELLING, S.CANCELLED), "cancelled", reason, actor)
    return run


@transaction.atomic
def pause_run(run_id: int, actor: str, why: str = "") -> Run:
    """Stop a run, with a checkpoint if it trains, until `resume_run`. Raises `NotPossible` once it ends or is cancelled."""
    run, attempt = _locked(run_id)
    if run.state in (S.PAUSED, S.PAUSING):
        return run
    if run.state in ENDED or run.state == S.CANCELLING:
        raise NotPossible(refusal("pause", run.state))
    reason = why or f"Paused by {_name(actor)}."
    _stop(run, attempt, settings.OPPO_STOP_DEADLINE_S, (S.PAUSING, S.PAUSED), "paused", reason, actor)
    return run


@transaction.atomic
def resume_run(run_id: int, actor: str) -> Run:
    """Queue a paused run again, behind runs of its priority; one that is pausing returns to its place after its stop.

    Raises:
        NotPossible: it is neither, or has reached its time limit.
    """
    run, _ = _locked(run_id)
    if run.state not in (S.PAUSED, S.PAUSING):
        raise NotPossible(refusal("resume", run.state))
    now = clock.now()
    if run.max_runtime_s is not None and device_seconds(run, now) >= run.max_runtime_s:
        raise NotPossible("Its time limit is reached; extend it first.")
    if run.state == S.PAUSING:
        move_run(
            run, S.PREEMPTING, f"Resumed by {_name(actor)} while it was pausing; it is queued again once it has stopped.", actor
        )
        return run
    # Paused time does not count as waiting: otherwise a run submitted early and paused would pass all others.
    Run.objects.filter(pk=run.pk).update(queued_at=now, not_before=None)
    move_run(run, S.QUEUED, f"Resumed by {_name(actor)}.", actor)
    return run


@transaction.atomic
def preempt_run(run_id: int, reason: str, actor: str = "scheduler") -> bool:
    """Preempt a run; it returns to the queue with its checkpoint and its place.

    Returns whether its devices are or will be free by this or an earlier request; False: it holds none.
    """
    run, attempt = _locked(run_id)
    if run.state in (S.PAUSING, S.PREEMPTING, S.CANCELLING):
        return True
    if attempt is None:
        return False
    _stop(run, attempt, settings.OPPO_STOP_DEADLINE_S, (S.PREEMPTING, S.QUEUED), "preempted", reason, actor)
    return True


@transaction.atomic
def set_priority(run_id: int, priority: int, actor: str) -> Run:
    """Set the priority within the team. Raises `NotPossible` outside 1 to 99, or once the run has ended."""
    run, _ = _locked(run_id)
    lowest, highest = PRIORITIES
    if not lowest <= priority <= highest:
        raise NotPossible(f"Priority must be an integer from {lowest} to {highest}.")
    if run.state in ENDED or run.state == S.CANCELLING:
        raise NotPossible(refusal("change", run.state))
    if priority != run.priority:
        _change(run, "priority", f"Priority {run.priority} became {priority}.", actor, priority=priority)
    return run


@transaction.atomic
def extend_run(run_id: int, hours: float, actor: str) -> Run:
    """Extend a run's time limit by some hours. Raises `NotPossible` without a limit, or once the run has ended."""
    run, _ = _locked(run_id)
    if run.state in ENDED or run.state == S.CANCELLING:
        raise NotPossible(refusal("extend", run.state))
    if run.max_runtime_s is None:
        raise NotPossible("It has no time limit to extend.")
    if not 0 < hours <= LONGEST_EXTENSION_H:
        raise NotPossible(f"Hours must be above 0 and at most {LONGEST_EXTENSION_H:,.0f}.")
    limit_s = run.max_runtime_s + 3600 * hours
    _change(
        run, "time limit", f"Extended by {hours:g} h; the time limit is now {limit_s / 3600:.4g} h.", actor, max_runtime_s=limit_s
    )
    return run


@transaction.atomic
def archive_run(run_id: int, actor: str) -> None:
    """Hide an ended run from lists, unless a filter has `archived:yes`; idempotent. Raises `NotPossible` before its end."""
    run, _ = _locked(run_id)
    if run.state not in ENDED:
        raise NotPossible(f"{run.name} is {run.state}. Only ended runs can be archived.")
    if run.archived_at is None:
        reason = "Archived. The filter archived:yes shows it."
        _change(run, "archived", reason, actor, {"archived": True}, archived_at=clock.now())


@transaction.atomic
def unarchive_run(run_id: int, actor: str) -> None:
    """Show a run in lists again; idempotent."""
    run, _ = _locked(run_id)
    if run.archived_at is not None:
        _change(run, "unarchived", "Unarchived.", actor, {"archived": False}, archived_at=None)


def device_seconds(run: Run, now: datetime) -> float:
    """Total time that engines of the run have held devices, from each claim to the attempt's end."""
    spans = Attempt.objects.filter(run=run, claimed_at__isnull=False).values_list("claimed_at", "ended_at")
    return sum(((ended or now) - claimed).total_seconds() for claimed, ended in spans)


def pause_overtime(now: datetime) -> int:
    """Pause runs that have reached their time limit. Returns their number. Part of the scheduler's cycle.

    A run that is ending concurrently is skipped.
    """
    held = ExpressionWrapper(Coalesce("attempts__ended_at", Value(now)) - F("attempts__claimed_at"), DurationField())
    limited = Run.objects.filter(state__in=(S.STARTING, S.RUNNING), max_runtime_s__isnull=False)
    rows = limited.annotate(held=Sum(held)).order_by("pk").values_list("pk", "max_runtime_s", "held")
    spent = [(run_id, limit_s) for run_id, limit_s, span in rows if span is not None and span.total_seconds() >= limit_s]
    paused = 0
    for run_id, limit_s in spent:
        with suppress(NotPossible):
            pause_run(run_id, "scheduler", f"The time limit of {limit_s / 3600:.4g} h is reached. Extend and resume the run.")
            paused += 1
    return paused


def _locked(run_id: int) -> tuple[Run, Attempt | None]:
    """The run and its live attempt, locked in this order."""
    run = Run.objects.select_for_update().get(pk=run_id)
    return run, Attempt.objects.select_for_update().filter(run=run, state__in=LIVE_ATTEMPT).first()


def _request_stop(attempt: Attempt | None, within_s: float) -> bool:
    """Set the deadline `stop_by`, which a later request may shorten only. Returns False for an attempt without an engine."""
    if attempt is None or attempt.state == AttemptState.ALLOCATED:
        return False
    deadline = clock.now() + timedelta(seconds=within_s)
    attempt.stop_by = deadline if attempt.stop_by is None else min(attempt.stop_by, deadline)
    attempt.save(update_fields=["stop_by"])
    return True


def _stop(
    run: Run, attempt: Attempt | None, within_s: float, states: tuple[RunState, RunState], outcome: str, reason: str, actor: str
) -> None:
    """Move the run to the first of `states` until its engine has stopped, or, without an engine, to the second at once."""
    stopping, stopped = states
    if _request_stop(attempt, within_s):
        move_run(run, stopping, reason, actor)
        return
    if attempt is not None:
        end_attempt(attempt, AttemptState.ENDED, outcome, reason)
    move_run(run, stopped, reason, actor)


def _change(run: Run, what: str, reason: str, actor: str, audited: dict[str, Any] | None = None, **values: Any) -> None:
    """Set `values`, with a row in the run's history and, for a user, the audit log (`audited`, by default `values`)."""
    Run.objects.filter(pk=run.pk).update(cursor=F("cursor") + 1, **values)
    Change.objects.create(run=run, what=what, reason=reason, actor=actor, at=clock.now())
    if actor.startswith(audit.PERSON):
        audit.record(run.project.team_id, actor, "run.change", f"run {run.pk} {run.name}", **(audited or values))
    run.refresh_from_db(fields=["cursor", *values])
    run_changed(run.pk)
    wake_scheduler()


def _name(actor: str) -> str:
    return actor.removeprefix("user:")
