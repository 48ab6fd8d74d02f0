"""Retention rules of teams for ended runs, applied by the housekeeper.

    run_days           the run is moved to the trash
    detail_days        its timeline, samples and logs are deleted; curves, events and checkpoints stay
    keep_checkpoints   all but its newest checkpoints are deleted

Guarantees. Runs that are tagged `keep`, are their project's baseline, or have a checkpoint that another run begins with are
exempt; this is checked again under the run's lock. A new rule waits `OPPO_RETENTION_GRACE_S` before it deletes anything. Each
deletion is reported among the run's events. One housekeeper at a time handles a team (compare-and-set), at most `MOST_RUNS` runs
and `MOST_BATCHES` batches per round.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Count, F, Q, QuerySet

from oppo_contract.states import ENDED
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.notify import run_changed
from oppo_platform.projects.models import Project
from oppo_platform.runs.models import Attempt, Change, Checkpoint, Run
from oppo_platform.runs.resume_sources import starting_runs
from oppo_platform.storage.artifact_deletion import request_deletion
from oppo_platform.storage.bulk_delete import DETAIL, delete_batch
from oppo_platform.storage.models import RunStorage, TeamStorage
from oppo_platform.storage.purging import vacuum
from oppo_platform.storage.trash import KEEP_TAG, RETENTION, delete_run
from oppo_platform.storage.usage import measure

MOST_RUNS, MOST_BATCHES = 20, 50
LONGEST_DAYS, MOST_KEPT = 36_500, 10_000
STEPS_NAMED = 20


@transaction.atomic
def set_retention(
    actor: User, team: Team, detail_days: int | None, run_days: int | None, keep_checkpoints: int | None
) -> TeamStorage:
    """Set a team's retention rules; None: no limit.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: a number is out of range.
    """
    demand(actor, Action.MANAGE_STORAGE, team.pk)
    if any(days is not None and not 1 <= days <= LONGEST_DAYS for days in (detail_days, run_days)):
        raise AccountError(f"Enter 1 to {LONGEST_DAYS:,} days, or leave empty for no limit.")
    if keep_checkpoints is not None and not 1 <= keep_checkpoints <= MOST_KEPT:
        raise AccountError(f"Keep 1 to {MOST_KEPT:,} checkpoints, or leave empty to keep all.")
    rules = {"detail_days": detail_days, "run_days": run_days, "keep_checkpoints": keep_checkpoints}
    row, _ = TeamStorage.objects.select_for_update().get_or_create(team=team)
    if any(getattr(row, name) != value for name, value in rules.items()):
        TeamStorage.objects.filter(team=team).update(**rules, retention_set_at=clock.now(), retained_at=None)
        audit.record(team.pk, actor, "retention.set", "the team", **rules)
        row.refresh_from_db()
    return row


def starts_at(row: TeamStorage) -> datetime | None:
    """When the team's rules take effect; None if they were never set."""
    return row.retention_set_at and row.retention_set_at + timedelta(seconds=settings.OPPO_RETENTION_GRACE_S)


def apply_retention() -> int:
    """One round for every team that is due. Returns the number of runs with deletions."""
    now = clock.now()
    set_before = now - timedelta(seconds=settings.OPPO_RETENTION_GRACE_S)
    due = Q(retained_at__isnull=True) | Q(retained_at__lte=now - timedelta(seconds=settings.OPPO_MEASURE_S))
    has_rules = Q(detail_days__isnull=False) | Q(run_days__isnull=False) | Q(keep_checkpoints__isnull=False)
    changed = 0
    for row in TeamStorage.objects.filter(due, has_rules, retention_set_at__lte=set_before).order_by("team"):
        if TeamStorage.objects.filter(due, pk=row.pk, retention_set_at=row.retention_set_at).update(retained_at=now):
            changed += _apply_to_team(row, now)
    if changed:
        vacuum()
    return changed


def _apply_to_team(row: TeamStorage, now: datetime) -> int:
    """One round for a team. If it is incomplete, the team is due again at once."""
    old = list(expired(row, now, "run_days")[:MOST_RUNS])
    trashed = sum(_rules_unchanged(row) and _trash(run.pk, row.team_id) for run in old)
    surplus = list(with_surplus_checkpoints(row)[:MOST_RUNS])
    pruned = sum(_rules_unchanged(row) and prune_checkpoints(run.pk, row.keep_checkpoints or 1) for run in surplus)
    detailed, done = _delete_detail(row, now)
    if not done or MOST_RUNS in (len(old), len(surplus)):
        TeamStorage.objects.filter(pk=row.pk, retained_at=now).update(retained_at=None)
    return trashed + pruned + detailed


def _rules_unchanged(row: TeamStorage) -> bool:
    return TeamStorage.objects.filter(pk=row.pk, retention_set_at=row.retention_set_at).exists()


def unprotected_runs(team_id: int) -> QuerySet[Run]:
    """Ended runs of the team that are not exempt from retention."""
    pinned = Project.objects.filter(team=team_id, pinned__isnull=False).values("pinned")
    used = Attempt.objects.filter(resume_from__isnull=False).exclude(run__state__in=ENDED).values("resume_from__run")
    begun = starting_runs().values("begins_with__run")
    ended = Run.objects.filter(project__team=team_id, state__in=ENDED, deleted_at__isnull=True, ended_at__isnull=False)
    return (
        ended.exclude(tags__contains=[KEEP_TAG]).exclude(pk__in=pinned).exclude(pk__in=used).exclude(pk__in=begun).defer("spec")
    )


def expired(row: TeamStorage, now: datetime, rule: str) -> QuerySet[Run]:
    """Runs that ended more than `rule` (`run_days` or `detail_days`) days ago, the oldest first."""
    days: int | None = getattr(row, rule)
    if days is None:
        return Run.objects.none()
    old = unprotected_runs(row.team_id).filter(ended_at__lte=now - timedelta(days=days)).order_by("ended_at", "pk")
    if rule == "run_days":
        return old
    return old.filter(Q(storage__detail_deleted_at__isnull=True) | Q(storage__detail_pending=True), storage__isnull=False)


def with_surplus_checkpoints(row: TeamStorage) -> QuerySet[Run]:
    """Runs with more checkpoints than the team keeps, annotated with their number as `kept`."""
    if row.keep_checkpoints is None:
        return Run.objects.none()
    counted = unprotected_runs(row.team_id).annotate(kept=Count("checkpoints"))
    return counted.filter(kept__gt=row.keep_checkpoints).order_by("pk")


@transaction.atomic
def _trash(run_id: int, team_id: int) -> bool:
    Run.objects.select_for_update(of=("self",)).get(pk=run_id)
    if not unprotected_runs(team_id).filter(pk=run_id).exists():
        return False
    delete_run(run_id, RETENTION)
    return True


@transaction.atomic
def prune_checkpoints(run_id: int, keep: int) -> bool:
    """Delete all but the newest `keep` checkpoints of an ended run. Returns whether there were more."""
    run = Run.objects.select_for_update(of=("self",)).select_related("project").get(pk=run_id)
    # Newer attempts first, even if an older one reached later steps.
    checkpoints = list(Checkpoint.objects.filter(run=run).order_by("-attempt__epoch", "-step", "-id"))
    rows, kept = checkpoints[keep:], {row.url for row in checkpoints[:keep]}
    if run.state not in ENDED or not rows or not unprotected_runs(run.project.team_id).filter(pk=run_id).exists():
        return False
    for row in rows:
        if row.url not in kept:  # a newer attempt may have rewritten the same folder
            request_deletion(run, row.url, row.bytes)
    Checkpoint.objects.filter(pk__in=[row.pk for row in rows]).delete()
    steps = ", ".join(str(row.step) for row in reversed(rows[-STEPS_NAMED:])) + (" …" if len(rows) > STEPS_NAMED else "")
    _record_change(run, f"Checkpoints of step {steps} were deleted: the team keeps the latest {keep} of an ended run.")
    RunStorage.objects.filter(run=run).update(settled=False)
    return True


def _delete_detail(row: TeamStorage, now: datetime) -> tuple[int, bool]:
    """(runs with deleted detail, whether all due runs are done)."""
    changed, left = 0, MOST_BATCHES
    due = list(expired(row, now, "detail_days").values_list("pk", flat=True)[: MOST_RUNS + 1])
    for run_id in due[:MOST_RUNS]:
        if not (_rules_unchanged(row) and _begin_detail(run_id, row.team_id, row.detail_days or 0)):
            continue
        changed += 1
        while rows := _delete_detail_batch(run_id):
            left -= 1
            if left <= 0:
                return changed, False
        if rows == 0:
            RunStorage.objects.filter(run=run_id).update(detail_pending=False)
            measure(run_id, recount=True)
    return changed, len(due) <= MOST_RUNS


@transaction.atomic
def _delete_detail_batch(run_id: int) -> int | None:
    """`delete_batch`, but None once the run was retried (`on_reopen`): the new attempt's detail is added to what is left."""
    if RunStorage.objects.select_for_update().filter(run=run_id, detail_pending=True).first() is None:
        return None
    return delete_batch(run_id, DETAIL)


@transaction.atomic
def _begin_detail(run_id: int, team_id: int, days: int) -> bool:
    """Mark the run's detail as deleted, which its pages show. False: the run has become exempt."""
    run = Run.objects.select_for_update(of=("self",)).get(pk=run_id)
    if not unprotected_runs(team_id).filter(pk=run_id).exists():
        return False
    untouched = RunStorage.objects.filter(run=run, detail_deleted_at__isnull=True)
    if untouched.update(detail_deleted_at=clock.now(), detail_pending=True):
        text = f"Timeline, samples and logs were deleted: the team keeps them for {days} days after a run has ended."
        _record_change(run, text)
    return True


def on_reopen(run_id: int) -> None:
    """A retried run grows again, and its new detail is shown."""
    RunStorage.objects.filter(run=run_id).update(settled=False, detail_deleted_at=None, detail_pending=False)


def _record_change(run: Run, reason: str) -> None:
    Change.objects.create(run=run, what=RETENTION, reason=reason, actor=RETENTION, at=clock.now())
    Run.objects.filter(pk=run.pk).update(cursor=F("cursor") + 1)
    run_changed(run.pk)
