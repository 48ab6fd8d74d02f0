"""Opens and closes alerts.

Guarantees: at most one alert per condition is open for a run, and `failed` and `finished` are announced once per end of a run
(unique constraints); of concurrent closings exactly one succeeds (compare-and-set). Deliveries are created in the same
transaction, so none is lost or duplicated. Callers hold the run's lock.
"""

from __future__ import annotations

from django.conf import settings
from django.db import transaction
from django.db.models import F, QuerySet

from oppo_platform import clock
from oppo_platform.accounts.models import Membership
from oppo_platform.alerts import messages
from oppo_platform.alerts.models import Alert, Delivery, MailChoice, Webhook
from oppo_platform.alerts.policy import ANNOUNCEMENTS, Condition
from oppo_platform.notify import run_changed
from oppo_platform.runs.models import Run

LONGEST_WHY = 1000


def with_related(runs: QuerySet[Run]) -> QuerySet[Run]:
    """Joins the tables that alerts and their messages need."""
    return runs.select_related("project__team", "user").defer("spec", "needs", "latest", "last_log_lines")


@transaction.atomic
def open_alert(
    run: Run, condition: Condition, why: str, value: float | None = None, threshold: float | None = None
) -> Alert | None:
    """Open an alert and create its deliveries; None if it is already open, or was announced.

    Args:
        run: with project, team and user joined.
        why: a sentence.
        value: the measured value, in the threshold's unit.
    """
    now = clock.now()
    once = condition in ANNOUNCEMENTS
    same = {"run": run, "condition": condition} | ({"epoch": run.epochs} if once else {"closed_at": None})
    values = {"team_id": run.project.team_id, "why": why[:LONGEST_WHY], "value": value, "threshold": threshold, "step": run.step}
    times = {"opened_at": now, "closed_at": now if once else None}
    alert, new = Alert.objects.get_or_create(**same, defaults={**values, **times})
    if not new:
        return None
    _create_deliveries(alert, run, Delivery.About.OPENED)
    _move_cursor(run)
    return alert


@transaction.atomic
def close_alert(run: Run, condition: Condition, why: str) -> Alert | None:
    """Close the open alert of a condition; None without one."""
    alert = Alert.objects.filter(run=run, condition=condition, closed_at=None).first()
    now = clock.now()
    if alert is None or not Alert.objects.filter(pk=alert.pk, closed_at=None).update(closed_at=now, closed_why=why):
        return None
    alert.closed_at, alert.closed_why = now, why
    _create_deliveries(alert, run, Delivery.About.CLOSED)
    _move_cursor(run)
    return alert


def close_all(run: Run, why: str) -> int:
    """Close all open alerts of the run. Returns their number."""
    open_now = Alert.objects.filter(run=run, closed_at=None).order_by("pk").values_list("condition", flat=True)
    return sum(close_alert(run, Condition(condition), why) is not None for condition in list(open_now))


def _move_cursor(run: Run) -> None:
    """Update live pages."""
    Run.objects.filter(pk=run.pk).update(cursor=F("cursor") + 1)
    run_changed(run.pk)


def _create_deliveries(alert: Alert, run: Run, about: Delivery.About) -> None:
    now = clock.now()
    common = {"alert": alert, "about": about, "created_at": now, "due_at": now}
    body = messages.webhook_body(alert, run, about, now)
    hooks = Webhook.objects.filter(team_id=alert.team_id, on=True, deleted_at=None, conditions__contains=[alert.condition])
    rows = [Delivery(webhook=hook, body=body, **common) for hook in hooks.only("pk")]
    # Closing is sent to webhooks only.
    if about == Delivery.About.OPENED and settings.OPPO_SMTP_URL:
        text = messages.mail_body(alert, run)
        rows += [Delivery(user_id=user_id, body=text, **common) for user_id in _mail_recipients(alert, run)]
    Delivery.objects.bulk_create(rows)


def _mail_recipients(alert: Alert, run: Run) -> list[int]:
    """Ids of the team's members whose mail settings include this alert."""
    members = Membership.objects.filter(
        team_id=alert.team_id, user__is_active=True, user__service_of=None, user__email__contains="@"
    )
    choices = {choice.user_id: choice for choice in MailChoice.objects.filter(team_id=alert.team_id)}
    return [
        user_id
        for user_id in members.order_by("user_id").values_list("user_id", flat=True)
        if _wants_mail(choices.get(user_id), own=user_id == run.user_id, condition=alert.condition)
    ]


def _wants_mail(choice: MailChoice | None, *, own: bool, condition: str) -> bool:
    """Whether mail settings include a condition, of the user's `own` run or another user's."""
    whose = choice.whose if choice is not None else MailChoice.Whose.OWN
    if whose == MailChoice.Whose.NONE or (whose == MailChoice.Whose.OWN and not own):
        return False
    return choice is None or condition in choice.conditions
