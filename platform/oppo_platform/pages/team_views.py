"""The pages of the user's teams: projects, members, and the current team."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_GET, require_POST

from oppo_platform.accounts import teams as service
from oppo_platform.accounts.access import visible_teams
from oppo_platform.accounts.current_team import choose_team
from oppo_platform.accounts.models import Membership, Role, Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.pages.page_context import member_page, teams_overview
from oppo_platform.pages.team_layout import Undoable, get_team, render_team, reply_with_message
from oppo_platform.projects import services as projects


@require_GET
def teams(request: HttpRequest) -> HttpResponse:
    """Every team of the user; a user with one team is redirected to it."""
    overview = teams_overview(request.user)
    if len(overview) == 1:
        return redirect("pages:team", overview[0]["team"].pk)
    return render(request, "teams.html", {"section": "teams", "entries": overview})


@require_GET
def team(request: HttpRequest, team_id: int) -> HttpResponse:
    """Projects, members, and for owners the open invites."""
    return show_team(request, get_team(request, team_id))


def show_team(request: HttpRequest, team: Team, status: int = 200, **fresh: Any) -> HttpResponse:
    """The team's first page; `fresh`: a new link, which is shown once, or a refused form."""
    forms = {"new_invite": {"note": "", "role": Role.MEMBER}, "new_member": {"user": "", "role": Role.MEMBER}, "new_project": ""}
    context = {**member_page(request.user, team), **forms, **fresh}
    return render_team(request, team, "team", "team/members.html", context, status)


@require_POST
def choose(request: HttpRequest) -> HttpResponse:
    """Set the current team, or with an empty choice all teams, and return to the previous page."""
    requested = request.POST.get("team", "")
    if requested and (not requested.isdecimal() or len(requested) > 18):
        raise Http404
    choose_team(request, get_team(request, int(requested)) if requested else None)
    back = request.POST.get("next", "")
    safe = url_has_allowed_host_and_scheme(back, allowed_hosts={request.get_host()}, require_https=request.is_secure())
    return redirect(back if safe else "pages:runs")


@require_POST
def create_project(request: HttpRequest, team_id: int) -> HttpResponse:
    """Create a project in a team of the user's."""
    team = get_team(request, team_id)
    name = request.POST.get("name", "")

    def again() -> HttpResponse:
        return show_team(request, team, status=422, new_project=name)

    return reply_with_message(
        request,
        lambda: f"{projects.create_project(request.user, team, name).name} was created.",
        "team",
        team_id,
        again=again,
    )


@require_POST
def set_member(request: HttpRequest, team_id: int) -> HttpResponse:
    """Add a member, or change a role."""
    team = get_team(request, team_id)
    who, role = request.POST.get("user", ""), request.POST.get("role", "")

    def change() -> str:
        membership = service.set_member(request.user, team, who, role)
        return f"{membership.user.username} is now {membership.role} in {team.name}."

    def again() -> HttpResponse:
        known = Membership.objects.filter(team=team, user__username=who).exists()  # the form is in that member's row
        return show_team(request, team, status=422, **({} if known else {"new_member": {"user": who, "role": role}}))

    return reply_with_message(request, change, "team", team_id, again=again)


@require_POST
def remove_member(request: HttpRequest, team_id: int, user_id: int) -> HttpResponse:
    """Remove a member from the team."""
    team = get_team(request, team_id)

    def change() -> Undoable:
        name = service.remove_member(request.user, team, user_id).username
        return Undoable(f"{name} is no longer in {team.name}.", reverse("pages:restore-member", args=[team_id, user_id]))

    try:
        return reply_with_message(request, change, "team", team_id)
    except Membership.DoesNotExist:
        raise Http404 from None


@require_POST
def restore_member(request: HttpRequest, team_id: int, user_id: int) -> HttpResponse:
    """Undo the removal of a member."""
    team = get_team(request, team_id)

    def change() -> str:
        membership = service.restore_member(request.user, team, user_id)
        name, role = membership.user.username, membership.role
        return f"{name} is {role} in {team.name} again. Tokens that {name} had for it stay revoked."

    try:
        return reply_with_message(request, change, "team", team_id)
    except User.DoesNotExist:
        raise Http404 from None


@require_POST
def leave(request: HttpRequest, team_id: int) -> HttpResponse:
    """Leave a team."""
    team = get_team(request, team_id)
    try:
        service.leave_team(request.user, team)
    except AccountError as refused:
        messages.error(request, str(refused))
        return redirect("pages:team", team_id)
    messages.success(request, f"You have left {team.name}.")
    return redirect("pages:teams" if visible_teams(request.user).exists() else "pages:runs")
