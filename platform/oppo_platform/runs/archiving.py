"""The archive: ended runs that lists hide unless the filter asks for them (`archived:yes`).

Each function is one transaction under the run's lock, and adds a row to the run's history and the audit log.
"""

from __future__ import annotations

from datetime import datetime

from django.db import transaction
from django.db.models import F

from oppo_contract.states import ENDED
from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.notify import run_changed
from oppo_platform.runs.lifecycle import NotPossible
from oppo_platform.runs.models import Change, Run


@transaction.atomic
def archive_run(run_id: int, actor: str) -> None:
    """Hide an ended run from lists; idempotent. Raises `NotPossible` for one that has not ended."""
    run = _locked(run_id)
    if run.state not in ENDED:
        raise NotPossible(f"{run.name} is {run.state}. Only ended runs can be archived.")
    if run.archived_at is None:
        _set(run, clock.now(), "archived", "Archived. The filter archived:yes shows it.", actor)


@transaction.atomic
def unarchive_run(run_id: int, actor: str) -> None:
    """Show it on lists again; idempotent."""
    run = _locked(run_id)
    if run.archived_at is not None:
        _set(run, None, "unarchived", "Unarchived.", actor)


def _locked(run_id: int) -> Run:
    return Run.objects.select_for_update(of=("self",)).select_related("project").get(pk=run_id)


def _set(run: Run, since: datetime | None, what: str, reason: str, actor: str) -> None:
    Run.objects.filter(pk=run.pk).update(archived_at=since, cursor=F("cursor") + 1)
    Change.objects.create(run=run, what=what, reason=reason, actor=actor, at=clock.now())
    audit.record(run.project.team_id, actor, "run.change", f"run {run.pk} {run.name}", archived=since is not None)
    run_changed(run.pk)
