"""Queries of alerts, restricted to the user's teams."""

from __future__ import annotations

from datetime import timedelta

from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import JSONObject
from typing_extensions import TypedDict

from oppo_platform import clock
from oppo_platform.accounts.access import memberships
from oppo_platform.accounts.models import Team, User
from oppo_platform.alerts.messages import AlertFacts, facts
from oppo_platform.alerts.models import Alert, Delivery, SeenAlerts, Silence
from oppo_platform.alerts.policy import FAILURES
from oppo_platform.clock import iso
from oppo_platform.cursors import read_cursor, write_cursor

MAX_PER_PAGE = 200
MAX_COUNTED = 99
RECENT_DAYS = 7  # how long an unacknowledged failure needs attention


class AlertSummary(AlertFacts):
    """An alert with its run and the user who acknowledged it."""

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
    """One alert. Raises `Alert.DoesNotExist`, also if it belongs to another team."""
    return _with_related(visible_alerts(user)).get(pk=alert_id)


def _with_related(alerts: QuerySet[Alert]) -> QuerySet[Alert]:
    return alerts.select_related("run", "team", "acknowledged_by").defer("run__spec", "run__latest", "run__needs")


def summary(alert: Alert) -> AlertSummary:
    """Converts an alert of one of this module's querysets to JSON fields."""
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
    attention: bool = False,
    team_id: int | None = None,
    run_id: int | None = None,
    condition: str = "",
    limit: int = 50,
    cursor: str = "",
) -> AlertList:
    """The user's alerts, newest first; `attention`: only those that need it. Raises `BadCursor`."""
    filters = {"team_id": team_id, "run_id": run_id, "condition": condition or None}
    alerts = _with_related(visible_alerts(user)).filter(**{name: value for name, value in filters.items() if value is not None})
    if only_open:
        alerts = alerts.filter(closed_at=None)
    if attention:
        alerts = needing_attention(alerts)
    if cursor:
        alerts = alerts.filter(pk__lt=read_cursor(cursor, int)[0])
    limit = max(1, min(limit, MAX_PER_PAGE))
    page = list(alerts.order_by("-id")[: limit + 1])
    following = write_cursor(page[limit - 1].pk) if len(page) > limit else None
    return AlertList(items=[summary(alert) for alert in page[:limit]], next=following)


def needing_attention(alerts: QuerySet[Alert]) -> QuerySet[Alert]:
    """Open alerts, and unacknowledged failures of the last days; not finished runs."""
    recent = clock.now_in_query() - timedelta(days=RECENT_DAYS)
    failures = Q(condition__in=sorted(FAILURES), acknowledged_at=None, opened_at__gt=recent)
    return alerts.filter(Q(closed_at=None) | failures)


def unread(user: User) -> int:
    """Number of unacknowledged alerts that need attention, since the user joined the team and last opened the list; at most
    `MAX_COUNTED` + 1.
    """
    joined = memberships(user).filter(team=OuterRef("team"), joined_at__lte=OuterRef("opened_at"))
    alerts = needing_attention(visible_alerts(user)).filter(Exists(joined), pk__gt=read_up_to(user), acknowledged_at=None)
    return alerts[: MAX_COUNTED + 1].count()


def read_up_to(user: User) -> int:
    """The last alert that the user has seen in the list; 0 without one."""
    return SeenAlerts.objects.filter(user_id=user.pk).values_list("up_to", flat=True).first() or 0


def last_mail_error(user: User, team: Team) -> str:
    """The error of the last mail about this team's alerts to the user; empty if it was sent."""
    mails = Delivery.objects.filter(user_id=user.pk, alert__team=team).exclude(state=Delivery.State.WAITING)
    last = mails.order_by("-id").first()
    return last.error if last is not None and last.state == Delivery.State.FAILED else ""


def silent() -> Exists:
    """Annotation of runs: whether the run is silenced."""
    return Exists(Silence.objects.filter(run=OuterRef("pk")))


def open_alerts() -> ArraySubquery:
    """Annotation of runs: an `OpenAlert` per open alert, oldest first."""
    alerts = Alert.objects.filter(run=OuterRef("pk"), closed_at=None).order_by("id")
    fields = JSONObject(id="id", condition="condition", why="why", acknowledged_by="acknowledged_by__username")
    return ArraySubquery(alerts.values(json=fields))
