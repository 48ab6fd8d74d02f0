"""Shared layout of a team's pages: header, and a tab for each page that the user's role may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse

from oppo_platform.accounts.access import Action, permits, role_in, visible_teams
from oppo_platform.accounts.models import Team
from oppo_platform.accounts.services import AccountError

# URL name, title, and the permission required to see it.
TABS = (
    ("team", "Members and projects", Action.READ),
    ("team-storage", "Storage", Action.READ),
    ("team-secrets", "Secrets", Action.NAME_SECRETS),
    ("team-alerts", "Alerts", Action.READ),
    ("team-tokens", "API tokens", Action.READ),
    ("team-audit", "Audit log", Action.SEE_AUDIT_LOG),
)


class Undoable(NamedTuple):
    """The message about a change, and the path that undoes it by POST."""

    message: str
    undo: str


def get_team(request: HttpRequest, team_id: int) -> Team:
    """The team; 404 for users who are not members."""
    team: Team = get_object_or_404(visible_teams(request.user), pk=team_id)
    return team


def render_team(
    request: HttpRequest, team: Team, page: str, template: str, context: dict[str, Any], status: int = 200
) -> HttpResponse:
    """Render a team's page; `page` is the name of the current tab."""
    role = role_in(request.user, team.pk)
    tabs = [
        {"title": title, "url": reverse(f"pages:{name}", args=[team.pk]), "current": name == page}
        for name, title, action in TABS
        if permits(role, action)
    ]
    return render(request, template, {"section": "teams", "team": team, "role": role, "tabs": tabs, **context}, status=status)


def reply_with_message(
    request: HttpRequest,
    change: Callable[[], str | Undoable],
    page: str,
    *arguments: int,
    again: Callable[[], HttpResponse] | None = None,
) -> HttpResponse:
    """Perform a change, add a message with the result, and redirect; a missing permission stays a 403.

    An `Undoable` message is shown with a button *Undo*; its path is in the message's tags (templates/base.html).

    `again`: renders the response to a refused change instead, with status 422: a page whose form keeps the posted values.
    """
    try:
        result = change()
        message, undo = result if isinstance(result, Undoable) else (result, "")
        messages.success(request, message, extra_tags=undo)
    except AccountError as refused:
        messages.error(request, str(refused))
        if again is not None:
            return again()
    return redirect(f"pages:{page}", *arguments)
