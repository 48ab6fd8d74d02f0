"""Message bodies: JSON of webhooks and texts of mails (docs/alerts.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.conf import settings
from typing_extensions import TypedDict

from oppo_platform.accounts.models import Team, User
from oppo_platform.alerts.models import Alert, Webhook
from oppo_platform.alerts.policy import LIMITS, Condition
from oppo_platform.clock import iso
from oppo_platform.runs.models import Run

SUBJECT, LONGEST_SUBJECT = "[OPPO] ", 200
SEPARATOR = f"\n{'-' * 40}\n\n"


class AlertFacts(TypedDict):
    """An alert in the API and in webhooks. Times are ISO 8601 in UTC."""

    id: int
    condition: str
    title: str
    why: str
    value: float | None
    threshold: float | None
    unit: str | None
    step: int
    opened_at: str
    closed_at: str | None
    closed_why: str


def facts(alert: Alert) -> AlertFacts:
    """Converts an alert to JSON fields."""
    condition = Condition(alert.condition)
    return AlertFacts(
        id=alert.pk,
        condition=condition.value,
        title=alert.title,
        why=alert.why,
        value=alert.value,
        threshold=alert.threshold,
        unit=LIMITS[condition].unit if condition in LIMITS else None,
        step=alert.step,
        opened_at=iso(alert.opened_at),
        closed_at=iso(alert.closed_at) if alert.closed_at else None,
        closed_why=alert.closed_why,
    )


def run_url(run_id: int) -> str:
    """The absolute URL of the run's page."""
    return f"{settings.OPPO_BASE_URL}/runs/{run_id}"


def webhook_body(alert: Alert, run: Run, about: str, at: datetime) -> str:
    """`{"type": "alert.opened" | "alert.closed", "timestamp", "data": {"alert", "run"}}`.

    Args:
        run: with project, team and user joined.
    """
    data: dict[str, Any] = {
        "id": run.pk,
        "name": run.name,
        "url": run_url(run.pk),
        "team": run.project.team.name,
        "project": run.project.name,
        "user": run.user.username,
        "state": run.state,
        "step": run.step,
        "total_steps": run.total_steps,
    }
    return json.dumps({"type": f"alert.{about}", "timestamp": iso(at), "data": {"alert": facts(alert), "run": data}})


def test_body(team: Team, actor: User, at: datetime) -> str:
    """The body of a test message."""
    data = {"team": team.name, "user": actor.username, "why": "Test message, requested with “Send test”."}
    return json.dumps({"type": "alert.test", "timestamp": iso(at), "data": data})


def as_chat_message(body: str, format: Webhook.Format) -> str:
    """A webhook's JSON body as the message of a chat service: a link to the run, the alert and why.

    Names are written by users: nothing in them is a link or mentions anybody.
    """
    message = json.loads(body)
    data = message["data"]
    run, alert = data.get("run"), data.get("alert")
    if run is None or alert is None:
        return _CHAT[format](f"OPPO: {data['why']}", "", "")
    title = alert["title"] if message["type"] == "alert.opened" else f"{alert['title']}: resolved"
    why = alert["why"] if message["type"] == "alert.opened" else alert["closed_why"] or alert["why"]
    place = f"{run['team']} / {run['project']}, {run['user']}, step {run['step']} of {run['total_steps']}"
    return _CHAT[format](f"{title}\n{why}\n{place}", f"{run['name']} #{run['id']}", run["url"])


def _slack(text: str, name: str, url: str) -> str:
    def escaped(part: str) -> str:
        return part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    link = f"<{url}|{escaped(name).replace('|', '¦')}> " if url else ""
    return json.dumps({"text": f"{link}{escaped(text)}", "unfurl_links": False})


def _discord(text: str, name: str, url: str) -> str:
    embed = (
        {"title": _PLAIN.sub(r"\\\1", name)[:256], "url": url, "description": _PLAIN.sub(r"\\\1", text)[:4000]} if url else None
    )
    message = {"embeds": [embed]} if embed else {"content": text}
    return json.dumps({**message, "allowed_mentions": {"parse": []}})


_PLAIN = re.compile(r"([\\*_~`|>#\[\]()])")  # markup of Discord
_CHAT = {Webhook.Format.SLACK: _slack, Webhook.Format.DISCORD: _discord}


def merge_mails(bodies: Sequence[str]) -> tuple[str, str]:
    """Subject and text of several mails merged into one."""
    parts = [body.partition("\n\n") for body in bodies]
    subject = parts[0][0]
    if len(parts) > 1:
        titles = "; ".join(head.removeprefix(SUBJECT) for head, _, _ in parts)
        subject = f"{SUBJECT}{len(parts)} alerts: {titles}"
    return subject[:LONGEST_SUBJECT], SEPARATOR.join(text for _, _, text in parts)


def mail_body(alert: Alert, run: Run) -> str:
    """Subject, an empty line, text."""
    subject = " ".join(f"{SUBJECT}{run.name}: {alert.title}".split())
    where = f"{run.project.team.name} / {run.project.name}, submitted by {run.user.username}"
    preferences = f"{settings.OPPO_BASE_URL}/teams/{run.project.team_id}/alerts"
    return (
        f"{subject}\n\n{alert.why}\n\n{run.name} ({where})\nstep {run.step} of {run.total_steps}\n{run_url(run.pk)}\n\n"
        f"Email settings: {preferences}\n"
    )
