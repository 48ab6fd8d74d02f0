"""Who asks, and for which run: what every call of the JSON API begins with."""

from __future__ import annotations

from django.http import HttpRequest

from oppo_platform.accounts.access import visible_projects
from oppo_platform.accounts.models import User
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.models import Project, Run

LARGEST_ID = 2**63 - 1


def person(request: HttpRequest) -> User:
    """The user whom the authenticator let in."""
    return request.auth  # type: ignore[attr-defined]  # ninja puts what the authenticator returned there


def run_of(request: HttpRequest, run_id: int) -> Run:
    """The run, of whose rows elsewhere something is asked. Raises `Run.DoesNotExist`, also when it is another team's."""
    return runs.visible_run(person(request), _possible(run_id))


def summary_of(request: HttpRequest, run_id: int) -> runs.RunSummary:
    """The run as lists and its page show it. Raises `Run.DoesNotExist`, also when it is another team's."""
    return runs.run_summary(runs.get_run(person(request), _possible(run_id)))


def _possible(run_id: int) -> int:
    """The id, if the database can hold it."""
    if run_id > LARGEST_ID:
        raise Run.DoesNotExist
    return run_id


def chosen_project(user: User, wanted: int | str | None) -> Project:
    """By id or name among the user's projects; the only one, or the first by name, when not given."""
    projects, text = visible_projects(user), "" if wanted is None else str(wanted)
    if not text:
        project = projects.first()
    elif text.isascii() and text.isdigit():
        project = projects.filter(pk=int(text)).first() if len(text) < 20 and int(text) <= LARGEST_ID else None
    else:
        project = projects.filter(name=text).first()
    if project is None:
        raise Project.DoesNotExist
    return project
