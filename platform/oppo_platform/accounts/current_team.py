"""The current team of a person, stored in the session: it only filters lists.

Links work with any choice: a run, project or team page is reachable for every member of its team.
"""

from __future__ import annotations

from django.http import HttpRequest

from oppo_platform.accounts.access import visible_teams
from oppo_platform.accounts.models import Team

SESSION_KEY = "team"


def current_team(request: HttpRequest) -> Team | None:
    """The chosen team; None for all of them, also after leaving the chosen one."""
    chosen = request.session.get(SESSION_KEY)
    return visible_teams(request.user).filter(pk=chosen).first() if chosen is not None else None


def choose_team(request: HttpRequest, team: Team | None) -> None:
    """Choose a team, or all of them."""
    if team is None:
        request.session.pop(SESSION_KEY, None)
    else:
        request.session[SESSION_KEY] = team.pk
