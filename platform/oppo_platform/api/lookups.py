"""Look-ups at the beginning of operations: the caller, the run, the project."""

from __future__ import annotations

from typing import Annotated

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from ninja import Path

from oppo_platform.accounts.models import User
from oppo_platform.projects.access import visible_projects
from oppo_platform.projects.models import Project
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.access import may_manage
from oppo_platform.runs.models import Run

LARGEST_ID = 2**63 - 1

RunId = Annotated[int, Path(description="The run's number.")]
CheckpointId = Annotated[int, Path(description="The checkpoint's number, from the run's list of checkpoints.")]


def caller(request: HttpRequest) -> User:
    """The authenticated user."""
    return request.auth  # type: ignore[attr-defined]  # ninja puts what the authenticator returned there


def get_run_row(request: HttpRequest, run_id: int) -> Run:
    """The bare run row, for operations that read related tables. Raises `Run.DoesNotExist`, also for another team's."""
    return runs.visible_run(caller(request), _possible(run_id))


def get_run_summary(request: HttpRequest, run_id: int) -> runs.RunSummary:
    """The run's summary. Raises `Run.DoesNotExist`, also for another team's."""
    return runs.run_summary(get_full_run(request, run_id))


def get_full_run(request: HttpRequest, run_id: int) -> Run:
    """The run with everything that its summary needs. Raises `Run.DoesNotExist`, also for another team's."""
    return runs.get_run(caller(request), _possible(run_id))


def managing_actor(request: HttpRequest, run_id: int) -> str:
    """The caller as an actor who may manage the run. Raises `Run.DoesNotExist` and `PermissionDenied`."""
    return check_may_manage(request, get_run_row(request, run_id))


def check_may_manage(request: HttpRequest, run: Run) -> str:
    """The same for a loaded run, which may be in the trash. Raises `PermissionDenied`."""
    user = caller(request)
    if not may_manage(user, run):
        raise PermissionDenied("Only maintainers can control, archive, delete and restore other users' runs.")
    return f"user:{user.username}"


def _possible(run_id: int) -> int:
    """The id, if the database can store it."""
    if run_id > LARGEST_ID:
        raise Run.DoesNotExist
    return run_id


def chosen_project(user: User, requested: int | str | None) -> Project:
    """By id or name among the user's projects; default: the only one, or the first by name."""
    projects, text = visible_projects(user), "" if requested is None else str(requested)
    if not text:
        project = projects.first()
    elif text.isascii() and text.isdigit():
        project = projects.filter(pk=int(text)).first() if len(text) < 20 and int(text) <= LARGEST_ID else None
    else:
        project = projects.filter(name=text).first()
    if project is None:
        raise Project.DoesNotExist
    return project
