"""The pinned baseline: the run of a project with which its other runs are compared."""

from __future__ import annotations

from django.db import transaction

from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.projects.access import visible_projects
from oppo_platform.projects.models import Project
from oppo_platform.runs.models import Run

MOST_PINNED = 10  # shown above a table of several projects


@transaction.atomic
def pin(run_id: int, actor: str) -> None:
    """Make a run the baseline of its project, replacing the previous one. Raises `Run.DoesNotExist`."""
    run, project = _locked(run_id)
    if project.pinned_id != run.pk:
        _set(project, run, run.pk, actor)


@transaction.atomic
def unpin(run_id: int, actor: str) -> None:
    """Remove the project's baseline, if it is this run. Raises `Run.DoesNotExist`."""
    run, project = _locked(run_id)
    if project.pinned_id == run.pk:
        _set(project, run, None, actor)


def _locked(run_id: int) -> tuple[Run, Project]:
    """Locks the run before its project, as deletion does; runs may be submitted meanwhile."""
    run = Run.objects.select_for_update(of=("self",)).get(pk=run_id, deleted_at__isnull=True)
    return run, Project.objects.select_for_update(no_key=True).get(pk=run.project_id)


def _set(project: Project, run: Run, pinned: int | None, actor: str) -> None:
    project.pinned_id = pinned
    project.save(update_fields=["pinned"])
    audit.record(project.team_id, actor, "run.change", f"run {run.pk} {run.name}", baseline=pinned is not None)


def pinned_runs(user: User, project: int | None = None, team_id: int | None = None) -> list[int]:
    """Ids of the baselines of the user's projects, optionally of one project or team, by project."""
    result = visible_projects(user).filter(pinned__isnull=False)
    if project is not None:
        result = result.filter(pk=project)
    if team_id is not None:
        result = result.filter(team_id=team_id)
    return [pk for pk in result.values_list("pinned_id", flat=True)[:MOST_PINNED] if pk is not None]
