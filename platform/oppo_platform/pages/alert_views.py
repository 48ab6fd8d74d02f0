"""The list of alerts, and a team's alert settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from oppo_platform.accounts.access import Action, demand, granting_roles, may, memberships, visible_teams
from oppo_platform.accounts.models import Team
from oppo_platform.accounts.services import AccountError
from oppo_platform.alerts import selectors, services, webhooks
from oppo_platform.alerts.models import MailChoice, Webhook
from oppo_platform.alerts.policy import ANNOUNCEMENTS, DEFAULTS, FAILURES, LIMITS, WINDOW_LIMITS, Condition, Rule
from oppo_platform.alerts.rules import set_rules, team_rules
from oppo_platform.alerts.titles import MEANINGS, TITLES
from oppo_platform.cursors import BadCursor
from oppo_platform.pages.team_layout import Undoable, get_team, render_team, reply_with_message

ALERTS_A_PAGE = 50
SHOWN = {"": "Needs attention", "all": "All"}


@require_GET
def alerts(request: HttpRequest) -> HttpResponse:
    """Alerts of all the user's teams, as the bell counts them: `show=all` includes others, `cursor` pages.

    Alerts after `read`, which the rows' own requests repeat, are marked as new.
    """
    show, cursor, read = (request.GET.get(name, "") for name in ("show", "cursor", "read"))
    if show not in SHOWN:
        raise Http404
    up_to = int(read) if read.isdecimal() and len(read) < 19 else selectors.read_up_to(request.user)
    try:
        result = selectors.list_alerts(request.user, attention=not show, limit=ALERTS_A_PAGE, cursor=cursor)
    except BadCursor:
        raise Http404 from None
    may_care = set(memberships(request.user).filter(role__in=granting_roles(Action.SUBMIT)).values_list("team_id", flat=True))
    params = {name: value for name, value in (("show", show), ("cursor", cursor)) if value}
    context = {
        "section": "alerts",
        "alerts": [
            {
                **alert,
                "may_care": alert["team_id"] in may_care,
                "new": alert["id"] > up_to,
                "announces": alert["condition"] in ANNOUNCEMENTS,
                "fails": alert["condition"] in FAILURES,
            }
            for alert in result["items"]
        ],
        "views": [
            {"title": title, "query": urlencode({"show": key} if key else {}), "current": key == show}
            for key, title in SHOWN.items()
        ],
        "show": show,
        "rows_url": f"{reverse('pages:alerts')}?{urlencode({**params, 'part': 'rows', 'read': up_to})}",
        "older": urlencode({**params, "cursor": result["next"]}) if result["next"] else "",
        "teams": visible_teams(request.user),
    }
    return render(request, "alerts/rows.html" if request.GET.get("part") else "alerts/list.html", context)


@require_GET
def team_alerts(request: HttpRequest, team_id: int) -> HttpResponse:
    """A team's rules and webhooks, and the user's mails; `?webhook=` requests the last deliveries of one only."""
    team, webhook = get_team(request, team_id), request.GET.get("webhook", "")
    if not webhook:
        return _settings(request, team)
    demand(request.user, Action.MANAGE_ALERTS, team.pk)
    hook = webhooks.team_webhooks(team).filter(pk=int(webhook)).first() if webhook.isdecimal() and len(webhook) < 19 else None
    if hook is None:
        raise Http404
    return render(request, "team/deliveries.html", {"hook": hook})


def _settings(
    request: HttpRequest, team: Team, rules: list[dict[str, Any]] | None = None, status: int = 200, **fresh: Any
) -> HttpResponse:
    """The page; `rules` as posted, if they were refused."""
    manages = may(request.user, Action.MANAGE_ALERTS, team.pk)
    choice = MailChoice.objects.filter(user=request.user, team=team).first() or MailChoice(user=request.user, team=team)
    context = {
        "rules": rules or [_shown(condition, *_words(rule)) for condition, rule in team_rules(team.pk).items()],
        "window_limits": WINDOW_LIMITS,
        "may_manage": manages,
        "hooks": webhooks.team_webhooks(team) if manages else [],
        "choice": choice,
        "whose": [("own", "my runs"), ("all", "all runs of the team"), ("none", "nothing")],
        "conditions": [{"key": c.value, "title": TITLES[c]} for c in Condition],
        "mail_refused": selectors.last_mail_error(request.user, team),
        "new_hook": {"url": "", "format": "", "conditions": list(Condition)},
        "formats": Webhook.Format.choices,
        **fresh,
    }
    return render_team(request, team, "team-alerts", "team/alerts.html", context, status)


def _words(rule: Rule) -> tuple[bool, str, str]:
    threshold = "" if rule.threshold is None else f"{rule.threshold:g}"
    return rule.on, threshold, "" if rule.window_steps is None else str(rule.window_steps)


def _shown(condition: Condition, on: bool, threshold: str, window: str) -> dict[str, Any]:
    return {
        "key": condition.value,
        "title": TITLES[condition],
        "meaning": MEANINGS[condition],
        "on": on,
        "threshold": threshold,
        "window": window,
        "limits": LIMITS.get(condition),
        "default": DEFAULTS[condition],
    }


@require_POST
def set_alert_rules(request: HttpRequest, team_id: int) -> HttpResponse:
    """Change a team's rules."""
    team = get_team(request, team_id)

    def change() -> str:
        demand(request.user, Action.MANAGE_ALERTS, team.pk)  # before validation
        changed = set_rules(request.user, team, {condition: _posted(request, condition) for condition in Condition})
        return f"{changed} rule{'' if changed == 1 else 's'} changed." if changed else "No rule was changed."

    def again() -> HttpResponse:
        return _settings(request, team, [_shown(c, *_given(request, c)) for c in Condition], status=422)

    return reply_with_message(request, change, "team-alerts", team_id, again=again)


def _given(request: HttpRequest, condition: Condition) -> tuple[bool, str, str]:
    """A posted rule: whether it is on, its threshold and its window."""
    on, threshold, window = (request.POST.get(f"{condition}-{name}", "") for name in ("on", "threshold", "window"))
    return bool(on), threshold, window


def _posted(request: HttpRequest, condition: Condition) -> Rule:
    default, (on, threshold, window) = DEFAULTS[condition], _given(request, condition)
    try:
        return Rule(
            on=on,
            threshold=None if default.threshold is None else float(threshold),
            window_steps=None if default.window_steps is None else int(window),
        )
    except ValueError:
        raise AccountError(f"{TITLES[condition]}: threshold and window must be numbers.") from None


@require_POST
def choose_mail(request: HttpRequest, team_id: int) -> HttpResponse:
    """Set the user's mails about this team."""
    team = get_team(request, team_id)
    whose, conditions = request.POST.get("whose", ""), request.POST.getlist("conditions")

    def change() -> str:
        services.choose_mail(request.user, team, whose, conditions)
        return "Email settings saved."

    return reply_with_message(request, change, "team-alerts", team_id)


@never_cache
@require_POST
def add_webhook(request: HttpRequest, team_id: int) -> HttpResponse:
    """Create a webhook, and show its secret once."""
    team = get_team(request, team_id)
    url, conditions = request.POST.get("url", ""), request.POST.getlist("conditions")
    format = request.POST.get("format", "")
    try:
        secret = webhooks.add_webhook(request.user, team, url, conditions, format)
    except AccountError as refused:
        messages.error(request, str(refused))
        return _settings(request, team, status=422, new_hook={"url": url, "format": format, "conditions": conditions})
    return _settings(request, team, fresh_secret=secret)


@require_POST
def change_webhook(request: HttpRequest, team_id: int, webhook_id: int) -> HttpResponse:
    """Enable, disable or change a webhook."""
    team = get_team(request, team_id)
    on, conditions = bool(request.POST.get("on")), request.POST.getlist("conditions")

    def change() -> str:
        hook = webhooks.change_webhook(request.user, team, webhook_id, on=on, conditions=conditions)
        return f"The webhook to {webhooks.webhook_host(hook)} was changed."

    return _of_webhook(request, change, team_id)


@require_POST
def delete_webhook(request: HttpRequest, team_id: int, webhook_id: int) -> HttpResponse:
    """Delete a webhook."""
    team = get_team(request, team_id)

    def change() -> Undoable:
        host = webhooks.delete_webhook(request.user, team, webhook_id)
        return Undoable(f"The webhook to {host} was deleted.", reverse("pages:restore-webhook", args=[team_id, webhook_id]))

    return _of_webhook(request, change, team_id)


@require_POST
def restore_webhook(request: HttpRequest, team_id: int, webhook_id: int) -> HttpResponse:
    """Undo the deletion of a webhook."""
    team = get_team(request, team_id)

    def change() -> str:
        hook = webhooks.restore_webhook(request.user, team, webhook_id)
        return f"The webhook to {webhooks.webhook_host(hook)} was restored."

    return _of_webhook(request, change, team_id)


@require_POST
def test_webhook(request: HttpRequest, team_id: int, webhook_id: int) -> HttpResponse:
    """Send a test message."""
    team = get_team(request, team_id)
    return _of_webhook(
        request,
        lambda: f"A test message to {webhooks.send_test(request.user, team, webhook_id)} will be sent; see the result below.",
        team_id,
    )


def _of_webhook(request: HttpRequest, change: Callable[[], str | Undoable], team_id: int) -> HttpResponse:
    try:
        return reply_with_message(request, change, "team-alerts", team_id)
    except Webhook.DoesNotExist:
        raise Http404 from None
