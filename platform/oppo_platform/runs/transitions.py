"""`move_run` and `allocate_runs`, the only functions that change a run's state.

Guarantee: every change of `Run.state` follows `oppo_contract.states.TRANSITIONS`, is made by exactly one of concurrent callers
(compare-and-set on the old state), and adds a `Transition` row in the same transaction. `ON_END` is called in that transaction at
a run's end, `ON_REOPEN` when a user retries it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from django.db import connection, transaction
from django.db.models import F

from oppo_contract.states import ENDED, RunState, can_transition
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.notify import run_changed, runs_changed, wake_scheduler
from oppo_platform.runs.models import Run, Transition

# Called with the run's id at its end. Apps above `runs` add theirs in `AppConfig.ready`.
ON_END: list[Callable[[int], None]] = []
ON_REOPEN: list[Callable[[int], None]] = []
# Called with the run's id and the reason, in the transaction in which an attempt ended by its node and the run continues.
ON_NODE_FAILED: list[Callable[[int, str], None]] = []


AttemptConflict = Literal["stale_epoch", "already_claimed", "not_your_node", "ended", "lease_lost", "unknown_checkpoint"]


class AttemptRefused(Exception):
    """A worker's request conflicts with the attempt's state; final for this call."""

    def __init__(self, reason: AttemptConflict, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(detail)


class MoveRefused(Exception):
    """The table of transitions forbids this move."""


class RunMoved(Exception):
    """Another process changed the run first; read it again and decide again."""


def move_run(run: Run, new: RunState, reason: str, actor: str) -> None:
    """Move `run` from its object's state to `new`, and update the object. `actor`: `user:ada`, `node:gpu1`, `scheduler`.

    Raises:
        MoveRefused: the table forbids it. RunMoved: the run is in another state.
    """
    old = RunState(run.state)
    if not can_transition(old, new):
        raise MoveRefused(f"Run {run.pk} cannot change from {old} to {new}.")
    with transaction.atomic():
        now = clock.now()
        changes: dict[str, object] = {"state": new, "reason": reason}
        if new == RunState.RUNNING and run.started_at is None:
            changes["started_at"] = now
        if new in ENDED:
            changes["ended_at"] = now
        elif old in ENDED:
            changes |= {"ended_at": None, "error": "", "last_log_lines": []}
        if new == RunState.FAILED:
            changes["error"] = reason
        moved = Run.objects.filter(pk=run.pk, state=old).update(cursor=F("cursor") + 1, **changes)
        if not moved:
            raise RunMoved(f"Run {run.pk} is no longer {old}.")
        Transition.objects.create(run_id=run.pk, old=old, new=new, reason=reason, actor=actor, at=now)
        if actor.startswith(audit.PERSON):
            audit.record(run.project.team_id, actor, f"run.{new}", f"run {run.pk} {run.name}", old=old)
        for hook in ON_END if new in ENDED else ON_REOPEN if old in ENDED else ():
            hook(run.pk)
        run_changed(run.pk)
        if new == RunState.QUEUED or new in ENDED:
            wake_scheduler()
    run.refresh_from_db(fields=["cursor", *changes])


def allocate_runs(reasons: Mapping[int, str]) -> list[int]:
    """Move queued runs to allocated by the scheduler, with a new epoch each, in one statement.

    `reasons`: by run, where it was allocated. Returns the runs that were still queued.
    """
    rows = f"UPDATE {Run._meta.db_table} AS run SET state = %s, reason = new.reason, cursor = run.cursor + 1, "  # noqa: S608 - no input
    rows += "epochs = run.epochs + 1 FROM unnest(%s::bigint[], %s::text[]) AS new(id, reason) "
    rows += "WHERE run.id = new.id AND run.state = %s RETURNING run.id"
    old, new, now = RunState.QUEUED, RunState.ALLOCATED, clock.now()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute(rows, [new, list(reasons), list(reasons.values()), old])
            moved = sorted(run_id for (run_id,) in cursor.fetchall())
        Transition.objects.bulk_create(
            Transition(run_id=run_id, old=old, new=new, reason=reasons[run_id], actor="scheduler", at=now) for run_id in moved
        )
        runs_changed(moved)
    return moved


def update_waiting_reasons(reasons: Mapping[int, str]) -> None:
    """Update the reasons of queued runs; runs with the same reason, and those that are no longer queued, are not changed.

    One statement for all: thousands of runs may wait behind the same run.
    """
    if not reasons:
        return
    rows = f"UPDATE {Run._meta.db_table} AS run SET reason = new.reason, cursor = run.cursor + 1 "  # noqa: S608 - no input
    rows += "FROM unnest(%s::bigint[], %s::text[]) AS new(id, reason) "
    rows += "WHERE run.id = new.id AND run.state = %s AND run.reason <> new.reason RETURNING run.id"
    with connection.cursor() as cursor:
        cursor.execute(rows, [list(reasons), list(reasons.values()), RunState.QUEUED])
        runs_changed([run_id for (run_id,) in cursor.fetchall()])
