"""The trash: deleted runs can be restored for some days and are then deleted permanently (`storage.purging`).

Guarantees. Each function is one transaction under the run's lock and writes an audit log entry. Forks and resumes from the run's
checkpoints take the same lock: of a concurrent deletion and fork, the later one is refused. A run is restored completely, or
refused because its purge has started.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from typing_extensions import TypedDict

from oppo_contract.states import ENDED
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.access import memberships
from oppo_platform.accounts.models import User
from oppo_platform.clock import iso
from oppo_platform.notify import run_changed
from oppo_platform.projects.models import Project
from oppo_platform.runs.models import Attempt, Change, Run
from oppo_platform.runs.resume_sources import runs_starting_from
from oppo_platform.storage.models import Deletion

NAMED = 5
RETENTION = "retention"  # the actor of automatic deletions
KEEP_TAG = "keep"  # exempts a run from retention


class DeletionRefused(Exception):
    """The run cannot be deleted or restored now; the message has the reason and a remedy."""


class Trashed(TypedDict):
    """A run in the trash. Times are ISO 8601 in UTC; `by` is the user who deleted it."""

    id: int
    name: str
    project: str
    team: str
    state: str
    deleted_at: str
    by: str
    restorable_until: str


@transaction.atomic
def delete_run(run_id: int, actor: str) -> Deletion:
    """Move an ended run to the trash; no effect if it is already there.

    Args:
        actor: `user:ada`, or `retention`.

    Raises:
        DeletionRefused: it has not ended, is its project's baseline, or others begin with its checkpoints.
        Run.DoesNotExist: it is deleted permanently.
    """
    run = _locked(run_id)
    if run.deleted_at is not None:
        return run.deletion
    if run.state not in ENDED:
        raise DeletionRefused(f"{run.name} is {run.state}. Only ended runs can be deleted: cancel it first.")
    if Project.objects.filter(pk=run.project_id, pinned=run).exists():  # pinning locks the run, too
        raise DeletionRefused(f"{run.name} is the pinned baseline of {run.project.name}. Unpin it or pin another run first.")
    users = dependents(run)
    if users:
        names = ", ".join(f"{user.name} (run {user.pk})" for user in users[:NAMED]) + (" …" if len(users) > NAMED else "")
        begin = "starts" if len(users) == 1 else "start"
        raise DeletionRefused(f"{names} {begin} from a checkpoint of {run.name}. Delete it after they have ended.")
    now = clock.now()
    due_at = now + timedelta(days=settings.OPPO_TRASH_DAYS)
    deletion = Deletion.objects.create(run=run, at=now, actor=actor, due_at=due_at)
    _hide(run, deletion.at, "deleted", f"Moved to trash until {due_at:%Y-%m-%d %H:%M} UTC.", actor)
    audit.record(run.project.team_id, actor, "run.delete", f"run {run.pk} {run.name}", until=due_at.isoformat())
    return deletion


@transaction.atomic
def restore_run(run_id: int, actor: str) -> Run:
    """Restore a run from the trash; no effect if it is not there. A run deleted by retention is tagged `keep`.

    Raises:
        DeletionRefused: its permanent deletion has started.
    """
    run = _locked(run_id)
    if run.deleted_at is None:
        return run
    if run.purged_at is not None:
        raise DeletionRefused(f"{run.name} has been permanently deleted.")
    if run.deletion.actor == RETENTION and KEEP_TAG not in run.tags:  # otherwise retention would delete it again
        Run.objects.filter(pk=run.pk).update(tags=[*run.tags, KEEP_TAG])
    Deletion.objects.filter(run=run).delete()
    _hide(run, None, "restored", "Restored from trash.", actor)
    audit.record(run.project.team_id, actor, "run.restore", f"run {run.pk} {run.name}")
    return run


@transaction.atomic
def purge_now(run_id: int, actor: str) -> None:
    """Delete a run in the trash permanently in the next round of housekeeping. Raises DeletionRefused: it is not in the trash."""
    run = _locked(run_id)
    if run.deleted_at is None:
        raise DeletionRefused(f"{run.name} is not in the trash; delete it first.")
    now = clock.now()
    if Deletion.objects.filter(run=run, due_at__gt=now).update(due_at=now):
        audit.record(run.project.team_id, actor, "run.purge", f"run {run.pk} {run.name}")


def in_trash(user: User, team_id: int | None = None) -> list[Deletion]:
    """Runs in the trash of the user's teams, or of one of them, the newest first."""
    teams = memberships(user).values("team_id")
    rows = Deletion.objects.filter(run__project__team_id__in=teams, run__purged_at__isnull=True)
    if team_id is not None:
        rows = rows.filter(run__project__team_id=team_id)
    return list(rows.select_related("run__project__team").defer("run__spec", "run__latest").order_by("-at", "-run_id"))


def trashed(deletion: Deletion) -> Trashed:
    """Converts a deletion to JSON fields."""
    run = deletion.run
    return Trashed(
        id=run.pk,
        name=run.name,
        project=run.project.name,
        team=run.project.team.name,
        state=run.state,
        deleted_at=iso(deletion.at),
        by=deletion.actor.removeprefix(audit.PERSON),
        restorable_until=iso(deletion.due_at),
    )


def _locked(run_id: int) -> Run:
    return Run.objects.select_for_update(of=("self",)).select_related("project__team").get(pk=run_id)


def _hide(run: Run, since: object, what: str, reason: str, actor: str) -> None:
    """Hide the run from `since` on, or show it again (None). Live pages are notified only when it is shown."""
    Run.objects.filter(pk=run.pk).update(deleted_at=since, cursor=F("cursor") + int(since is None))
    Change.objects.create(run=run, what=what, reason=reason, actor=actor, at=clock.now())
    run.refresh_from_db(fields=["deleted_at", "cursor"])
    if since is None:
        run_changed(run.pk)


def dependents(run: Run) -> list[Run]:
    """Other active runs that begin with one of the run's checkpoints. The caller holds the run's lock, so none is added."""
    using = Attempt.objects.filter(resume_from__run=run).exclude(run=run)
    waiting = runs_starting_from(run).exclude(pk=run.pk)
    return list(
        Run.objects.filter(Q(pk__in=using.values("run")) | Q(pk__in=waiting.values("pk")))
        .exclude(state__in=ENDED)
        .defer("spec")
        .order_by("pk")
    )
