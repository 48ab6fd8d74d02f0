"""API tokens of a team: members create and revoke their own, owners also service tokens and any other."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from oppo_platform.accounts import api_tokens as service
from oppo_platform.accounts.access import Action, may
from oppo_platform.accounts.models import ApiToken, Scope, Team
from oppo_platform.accounts.services import AccountError
from oppo_platform.pages.team_layout import get_team, render_team, reply_with_message

VALIDITIES = {"7": "7 days", "30": "30 days", "90": "90 days", "365": "1 year", "": "never expires"}
SCOPE_WORDS = {
    Scope.READ: "view only",
    Scope.SUBMIT: "also submit and control runs",
    Scope.ADMIN: "everything your role allows",
}


@require_GET
def tokens(request: HttpRequest, team_id: int) -> HttpResponse:
    """The tokens with their last use, and a form to create one."""
    return _page(request, get_team(request, team_id))


@never_cache
@require_POST
def create_token(request: HttpRequest, team_id: int) -> HttpResponse:
    """Create a token, and show it once."""
    team = get_team(request, team_id)
    name, days, scope = (request.POST.get(field, "") for field in ("name", "days", "scope"))
    make = service.create_service_token if request.POST.get("service") else service.create_own_token
    try:
        made = make(request.user, team, name, float(days) if days in VALIDITIES and days else None, scope)
    except AccountError as refused:
        messages.error(request, str(refused))
        given = {"name": name, "scope": scope, "days": days}
        return _page(request, team, status=422, **{"new_service" if request.POST.get("service") else "new_own": given})
    return _page(request, team, made=made)


@require_POST
def revoke_token(request: HttpRequest, team_id: int, token_id: int) -> HttpResponse:
    """Revoke a token."""
    team = get_team(request, team_id)

    def change() -> str:
        return f"{service.revoke_token(request.user, token_id).name} was revoked."

    try:
        return reply_with_message(request, change, "team-tokens", team.pk)
    except ApiToken.DoesNotExist:
        raise Http404 from None


def _page(request: HttpRequest, team: Team, made: service.Made | None = None, status: int = 200, **given: Any) -> HttpResponse:
    """The page; `given`: a refused form as posted."""
    result = list(service.visible_tokens(request.user, team.pk))
    context: dict[str, Any] = {
        "own": [token for token in result if token.user_id == request.user.pk],
        "others": [token for token in result if token.user_id != request.user.pk],
        "may_manage": may(request.user, Action.MANAGE_TOKENS, team.pk),
        "may_submit": may(request.user, Action.SUBMIT, team.pk),
        "validities": VALIDITIES.items(),
        "scopes": SCOPE_WORDS.items(),
        "made": made,
        "base_url": settings.OPPO_BASE_URL,
        "new_own": {"name": "", "scope": Scope.SUBMIT, "days": "90"},
        "new_service": {"name": "", "scope": Scope.SUBMIT, "days": "365"},
        **given,
    }
    return render_team(request, team, "team-tokens", "team/tokens.html", context, status)
