"""Context of every page."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest

from oppo_platform.accounts.access import Action, granting_roles, memberships, visible_teams
from oppo_platform.accounts.current_team import current_team
from oppo_platform.alerts.selectors import unread


def shell(request: HttpRequest) -> dict[str, Any]:
    """The team switcher, the bell, whether the user may submit (queried only if used), whether mail is enabled."""
    if not hasattr(request, "user") or not request.user.is_authenticated:
        return {"mail_is_sent": bool(settings.OPPO_SMTP_URL)}
    return {
        "own_teams": visible_teams(request.user),
        "current_team": lambda: current_team(request),
        "unread_alerts": lambda: unread(request.user),
        "submits": lambda: memberships(request.user).filter(role__in=granting_roles(Action.SUBMIT)).exists(),
        "mail_is_sent": bool(settings.OPPO_SMTP_URL),
    }
