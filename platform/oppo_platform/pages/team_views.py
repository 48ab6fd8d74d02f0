"""The page of the user's teams, and the two forms on it."""

from __future__ import annotations

from collections.abc import Callable

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from oppo_platform.accounts import teams as service
from oppo_platform.accounts.access import visible_teams
from oppo_platform.accounts.models import Team
from oppo_platform.accounts.services import AccountError
from oppo_platform.pages.selectors import teams_with_members


@require_GET
def teams(request: HttpRequest) -> HttpResponse:
    """Teams with their projects and members, and what the user may change."""
    return render(request, "teams.html", {"section": "teams", "entries": teams_with_members(request.user)})


@require_POST
def create_project(request: HttpRequest, team_id: int) -> HttpResponse:
    """Make a project in a team of the user's."""
    team = get_object_or_404(visible_teams(request.user), pk=team_id)
    name = request.POST.get("name", "")
    return _told(request, lambda: f"{service.create_project(request.user, team, name).name} is ready for runs.")


@require_POST
def set_member(request: HttpRequest, team_id: int) -> HttpResponse:
    """Add a member, or change a role."""
    team: Team = get_object_or_404(visible_teams(request.user), pk=team_id)
    who, role = request.POST.get("user", ""), request.POST.get("role", "")

    def change() -> str:
        membership = service.set_member(request.user, team, who, role)
        return f"{membership.user.username} is now {membership.role} in {team.name}."

    return _told(request, change)


def _told(request: HttpRequest, change: Callable[[], str]) -> HttpResponse:
    try:
        messages.success(request, change())
    except AccountError as refused:
        messages.error(request, str(refused))
    except service.NotAllowed as refused:
        raise PermissionDenied(str(refused)) from None
    return redirect("pages:teams")
