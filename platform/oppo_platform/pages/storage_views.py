"""A team's disk usage, its trash, and the page of a run in the trash."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from django.conf import settings
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from oppo_platform.accounts.access import Action, demand, may
from oppo_platform.accounts.models import Team
from oppo_platform.accounts.services import AccountError
from oppo_platform.pages.team_layout import get_team, render_team, reply_with_message
from oppo_platform.runs.access import manageable, may_manage, trashed_runs
from oppo_platform.runs.models import Run
from oppo_platform.storage.models import TeamStorage
from oppo_platform.storage.quotas import quota_usage
from oppo_platform.storage.retention import set_retention, starts_at
from oppo_platform.storage.selectors import pending_folders, team_taken, upcoming
from oppo_platform.storage.trash import DeletionRefused, in_trash, purge_now, restore_run, trashed

RunView = Callable[[HttpRequest, int], HttpResponse]


@require_GET
def storage(request: HttpRequest, team_id: int) -> HttpResponse:
    """The team's storage usage by run, and its trash."""
    team = get_team(request, team_id)
    return _page(request, team, TeamStorage.objects.filter(team=team).first())


def _page(request: HttpRequest, team: Team, rules: TeamStorage | dict[str, str] | None, status: int = 200) -> HttpResponse:
    """The page; `rules` are the saved ones, or the posted ones if they were refused."""
    found = [trashed(deletion) for deletion in in_trash(request.user, team.pk)]
    runs = Run.objects.filter(pk__in=[each["id"] for each in found]).select_related("project")
    context = {
        "used": team_taken(team),
        "rules": rules,
        "upcoming": upcoming(team.pk),
        "may_manage": may(request.user, Action.MANAGE_STORAGE, team.pk),
        "grace_h": f"{settings.OPPO_RETENTION_GRACE_S / 3600:g}",
        "level": quota_usage(team.pk),
        "trash": found,
        "may_restore": manageable(request.user, runs),
        "trash_days": f"{settings.OPPO_TRASH_DAYS:g}",
        "folders": pending_folders(team.pk),
    }
    return render_team(request, team, "team-storage", "team/storage.html", context, status)


@require_POST
def set_rules(request: HttpRequest, team_id: int) -> HttpResponse:
    """Set the team's retention of ended runs."""
    team = get_team(request, team_id)
    given = {name: request.POST.get(name, "") for name in ("detail_days", "run_days", "keep_checkpoints")}

    def change() -> str:
        demand(request.user, Action.MANAGE_STORAGE, team.pk)  # before the input is validated
        days, run_days, checkpoints = map(_whole, given.values())
        row = set_retention(request.user, team, days, run_days, checkpoints)
        if days is run_days is checkpoints is None:
            return "Retention is off: everything is kept without limit."
        begins = starts_at(row)
        return f"Saved. The new rules delete nothing before {begins:%Y-%m-%d %H:%M} UTC; the first deletions are listed below."

    return reply_with_message(request, change, "team-storage", team_id, again=lambda: _page(request, team, given, status=422))


def _whole(text: str) -> int | None:
    """A number from the form; None if empty."""
    if not text.strip():
        return None
    if not text.strip().isdecimal() or len(text) > 9:
        raise AccountError("Enter integers, or leave empty to keep everything.")
    return int(text)


@require_POST
def restore(request: HttpRequest, run_id: int) -> HttpResponse:
    """Restore a run from the trash, and show it."""
    run = _steered(request, run_id)
    try:
        restore_run(run.pk, f"user:{request.user.get_username()}")
    except DeletionRefused as refused:
        messages.error(request, str(refused))
        return redirect("pages:team-storage", run.project.team_id)
    messages.success(request, f"{run.name} was restored.")
    return redirect("pages:run", run.pk)


@require_POST
def purge(request: HttpRequest, run_id: int) -> HttpResponse:
    """Delete a run in the trash permanently."""
    run = _steered(request, run_id)
    try:
        purge_now(run.pk, f"user:{request.user.get_username()}")
        messages.success(request, f"{run.name} is being deleted permanently.")
    except DeletionRefused as refused:
        messages.error(request, str(refused))
    return redirect("pages:team-storage", run.project.team_id)


def or_trash(view: RunView) -> RunView:
    """Decorator of a run page: for a run in the trash, it shows the page about that."""

    @wraps(view)
    def shown(request: HttpRequest, run_id: int) -> HttpResponse:
        try:
            return view(request, run_id)
        except Http404:
            if request.GET.get("part"):  # a fragment of an open page
                raise
            return _in_trash(request, _trashed(request, run_id))

    return shown


def _in_trash(request: HttpRequest, run: Run) -> HttpResponse:
    context = {
        "section": "runs",
        "run": trashed(run.deletion),
        "team_id": run.project.team_id,
        "may_restore": may_manage(request.user, run),
    }
    return render(request, "run/trashed.html", context)


def _trashed(request: HttpRequest, run_id: int) -> Run:
    run: Run = get_object_or_404(trashed_runs(request.user).select_related("project__team", "deletion"), pk=run_id)
    return run


def _steered(request: HttpRequest, run_id: int) -> Run:
    run = _trashed(request, run_id)
    if not may_manage(request.user, run):
        raise PermissionDenied("Only maintainers can control, archive, delete and restore other users' runs.")
    return run
