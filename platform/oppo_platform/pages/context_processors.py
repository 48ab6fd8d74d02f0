"""What every page can show."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest

from oppo_platform.accounts.access import visible_teams
from oppo_platform.accounts.current_team import current_team
from oppo_platform.alerts.selectors import unread


def shell(request: HttpRequest) -> dict[str, Any]:
    """Context of every page: the switcher, the bell (both queried only where a template asks), and whether mail is sent."""
    if not hasattr(request, "user") or not request.user.is_authenticated:
        return {"mail_is_sent": bool(settings.OPPO_SMTP_URL)}
    return {
        "own_teams": visible_teams(request.user),
        "current_team": lambda: current_team(request),
        "unread_alerts": lambda: unread(request.user),
        "mail_is_sent": bool(settings.OPPO_SMTP_URL),
    }
