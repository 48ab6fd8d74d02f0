"""The audit log of a team, for its owners, and of the cluster, for administrators."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from oppo_platform.accounts.access import Action, administers, demand
from oppo_platform.accounts.audit import audit_page
from oppo_platform.pages.team_layout import get_team, render_team


@require_GET
def audit_log(request: HttpRequest, team_id: int) -> HttpResponse:
    """The log, newest first; `actor` and `action` filter, `before` is an older page."""
    team = get_team(request, team_id)
    demand(request.user, Action.SEE_AUDIT_LOG, team.pk)
    return render_team(request, team, "team-audit", "team/audit.html", _page(request, team.pk))


@require_GET
def cluster_log(request: HttpRequest) -> HttpResponse:
    """Actions on pools and nodes, for administrators."""
    if not administers(request.user):
        raise PermissionDenied("Only cluster administrators can read this audit log.")
    return render(request, "cluster_audit.html", {"section": "queue", **_page(request, None)})


def _page(request: HttpRequest, team_id: int | None) -> dict[str, Any]:
    actor, action, before = (request.GET.get(name, "") for name in ("actor", "action", "before"))
    if before and (not before.isdecimal() or len(before) > 18):
        raise Http404
    page = audit_page(team_id, actor, action, int(before) if before else None)
    params = {name: value for name, value in (("actor", actor), ("action", action)) if value}
    older = urlencode({**params, "before": page.older}) if page.older else ""
    return {"page": page, "actor": actor, "action": action, "older": older, "filtered": bool(params or before)}
