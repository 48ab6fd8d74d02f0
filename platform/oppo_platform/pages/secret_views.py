"""A team's secrets: names for members, changes for owners. Values are never shown."""

from __future__ import annotations

from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_POST

from oppo_platform.accounts import team_secrets as service
from oppo_platform.accounts.access import Action, demand, may
from oppo_platform.accounts.models import Team, TeamSecret
from oppo_platform.pages.team_layout import get_team, render_team, reply_with_message


@require_GET
def secrets(request: HttpRequest, team_id: int) -> HttpResponse:
    """The secrets, who set them when, and the last run that got them."""
    team = get_team(request, team_id)
    demand(request.user, Action.NAME_SECRETS, team.pk)
    return _shown(request, team)


def _shown(request: HttpRequest, team: Team, status: int = 200, name: str = "") -> HttpResponse:
    """The page; `name` as posted, if the secret was refused. Its value must be typed again."""
    manages = may(request.user, Action.MANAGE_SECRETS, team.pk)
    context = {"secrets": service.team_secrets(team), "may_manage": manages, "new_name": name}
    return render_team(request, team, "team-secrets", "team/secrets.html", context, status)


@sensitive_post_parameters("value")
@require_POST
def set_secret(request: HttpRequest, team_id: int) -> HttpResponse:
    """Set a secret, or replace its value."""
    team = get_team(request, team_id)
    name, value = request.POST.get("name", "").strip(), request.POST.get("value", "")

    def change() -> str:
        replaced = service.set_secret(request.user, team, name, value)
        return (
            f"{name} was updated. Runs that start from now on use the new value."
            if replaced
            else f"{name} was added. Reference it as secret:{name}."
        )

    return reply_with_message(request, change, "team-secrets", team_id, again=lambda: _shown(request, team, 422, name))


@require_POST
def delete_secret(request: HttpRequest, team_id: int, name: str) -> HttpResponse:
    """Delete a secret."""
    team = get_team(request, team_id)

    def change() -> str:
        service.delete_secret(request.user, team, name)
        return f"{name} was deleted. If it may have leaked, also revoke it at its provider."

    try:
        return reply_with_message(request, change, "team-secrets", team_id)
    except TeamSecret.DoesNotExist:
        raise Http404 from None
