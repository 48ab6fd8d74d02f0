"""The audit log of a team, for its owners."""

from __future__ import annotations

from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.audit import audit_page
from oppo_platform.pages.team_shell import render_team, team_of


@require_GET
def audit_log(request: HttpRequest, team_id: int) -> HttpResponse:
    """Who did what, newest first; `actor` and `action` filter, `before` is an older page."""
    team = team_of(request, team_id)
    demand(request.user, Action.SEE_AUDIT_LOG, team.pk)
    actor, action, before = (request.GET.get(name, "") for name in ("actor", "action", "before"))
    if before and (not before.isdecimal() or len(before) > 18):
        raise Http404
    page = audit_page(team.pk, actor, action, int(before) if before else None)
    kept = {name: value for name, value in (("actor", actor), ("action", action)) if value}
    older = urlencode({**kept, "before": page.older}) if page.older else ""
    context = {"page": page, "actor": actor, "action": action, "older": older, "filtered": bool(kept or before)}
    return render_team(request, team, "team-audit", "team/audit.html", context)
