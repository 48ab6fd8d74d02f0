"""Queries of alerts. A user sees those of their teams; others do not exist for them."""

from __future__ import annotations

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import Exists, OuterRef, QuerySet
from django.db.models.functions import JSONObject
from typing_extensions import TypedDict

from oppo_platform.accounts.access import memberships
from oppo_platform.accounts.models import Team, User
from oppo_platform.alerts.messages import AlertFacts, facts
from oppo_platform.alerts.models import Alert, Delivery, SeenAlerts, Silence
from oppo_platform.clock import iso
from oppo_platform.cursors import read_cursor, write_cursor

MOST_A_PAGE = 200
MOST_COUNTED = 99


class AlertSummary(AlertFacts):
    """An alert with its run, and who acknowledged it."""

    run: int
    run_name: str
    run_state: str
    team: str
    team_id: int
    acknowledged_at: str | None
    acknowledged_by: str | None
    url: str


class AlertList(TypedDict):
    """One page of alerts; `next` is the `cursor` of the following page."""

    items: list[AlertSummary]
    next: str | None


def visible_alerts(user: User) -> QuerySet[Alert]:
    """Alerts of the user's teams, without those of runs in the trash."""
    return Alert.objects.filter(team_id__in=memberships(user).values("team_id"), run__deleted_at__isnull=True)


def get_alert(user: User, alert_id: int) -> Alert:
    """One alert. Raises `Alert.DoesNotExist`, also for another team's."""
    return _joined(visible_alerts(user)).get(pk=alert_id)


def _joined(alerts: QuerySet[Alert]) -> QuerySet[Alert]:
    return alerts.select_related("run", "team", "acknowledged_by").defer("run__spec", "run__latest", "run__needs")


def summary(alert: Alert) -> AlertSummary:
    """The alert as JSON, from one of this module's querysets."""
    return AlertSummary(
        **facts(alert),
        run=alert.run_id,
        run_name=alert.run.name,
        run_state=alert.run.state,
        team=alert.team.name,
        team_id=alert.team_id,
        acknowledged_at=iso(alert.acknowledged_at) if alert.acknowledged_at else None,
        acknowledged_by=alert.acknowledged_by.username if alert.acknowledged_by else None,
        url=f"/runs/{alert.run_id}/events?kinds=alert,alert_closed",
    )


def list_alerts(
    user: User,
    *,
    only_open: bool = False,
    team_id: int | None = None,
    run_id: int | None = None,
    condition: str = "",
    limit: int = 50,
    cursor: str = "",
) -> AlertList:
    """The user's alerts, newest first. Raises `BadCursor`."""
    filters = {"team_id": team_id, "run_id": run_id, "condition": condition or None}
    alerts = _joined(visible_alerts(user)).filter(**{name: value for name, value in filters.items() if value is not None})
    if only_open:
        alerts = alerts.filter(closed_at=None)
    if cursor:
        alerts = alerts.filter(pk__lt=read_cursor(cursor, int)[0])
    limit = max(1, min(limit, MOST_A_PAGE))
    result = list(alerts.order_by("-id")[: limit + 1])
    following = write_cursor(result[limit - 1].pk) if len(result) > limit else None
    return AlertList(items=[summary(alert) for alert in result[:limit]], next=following)


def unread(user: User) -> int:
    """Number of unacknowledged alerts since the user last opened the list; at most `MOST_COUNTED` + 1."""
    up_to = SeenAlerts.objects.filter(user_id=user.pk).values_list("up_to", flat=True).first() or 0
    news = visible_alerts(user).filter(pk__gt=up_to, acknowledged_at=None)
    return news[: MOST_COUNTED + 1].count()


def mail_refused(user: User, team: Team) -> str:
    """Why the last mail about this team's alerts did not reach the user; empty if it did."""
    last = (
        Delivery.objects.filter(user_id=user.pk, alert__team=team).exclude(state=Delivery.State.WAITING).order_by("-id").first()
    )
    return last.error if last is not None and last.state == Delivery.State.FAILED else ""


def silent() -> Exists:
    """For a queryset of runs: whether the run is silenced."""
    return Exists(Silence.objects.filter(run=OuterRef("pk")))


def open_alerts() -> ArraySubquery:
    """For a queryset of runs: its open alerts as `OpenAlert`, oldest first."""
    result = Alert.objects.filter(run=OuterRef("pk"), closed_at=None).order_by("id")
    return ArraySubquery(
        result.values(item=JSONObject(id="id", condition="condition", why="why", acknowledged_by="acknowledged_by__username"))
    )
