"""Alerts over HTTP (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Path, Query, Router, Schema
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from oppo_platform.accounts.access import visible_teams
from oppo_platform.alerts import selectors, services
from oppo_platform.alerts.models import Alert
from oppo_platform.alerts.policy import Condition
from oppo_platform.api.lookups import LARGEST_ID, RunId, caller, get_run_row, get_run_summary
from oppo_platform.api.paging import Cursor, Limit
from oppo_platform.api.problems import problem
from oppo_platform.runs import selectors as runs

router = Router()
AlertId = Annotated[int, Path(description="The alert's number.")]


class SeenBody(Schema):
    """The newest alert that the user has seen."""

    model_config = ConfigDict(extra="forbid")

    up_to: int = Field(ge=0, le=LARGEST_ID, description="The number of the newest alert that you have seen.")


class SilenceBody(Schema):
    """Whether to silence a run."""

    model_config = ConfigDict(extra="forbid")

    silent: bool = Field(description="Whether the run opens no alerts from now on.")


class Unread(TypedDict):
    """Number of unread alerts; 100 means more than 99."""

    unread: int


@router.get("alerts", summary="Alerts of your teams' runs")
def list_alerts(
    request: HttpRequest,
    open: Annotated[bool, Query(description="Only alerts that are open.")] = False,
    team: Annotated[int | None, Query(description="Only this team's, by number.")] = None,
    run: Annotated[int | None, Query(description="Only this run's, by number.")] = None,
    condition: Annotated[str, Query(description="Only alerts of this condition (docs/alerts.md).")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> selectors.AlertList | Any:
    """Newest first; `open` leaves out closed ones."""
    if condition and condition not in set(Condition):
        return problem(422, f"Unknown condition {condition[:40]}; conditions are {', '.join(Condition)}.")
    if run is not None:
        get_run_row(request, run)
    user = caller(request)
    if team is not None:
        visible_teams(user).get(pk=min(team, LARGEST_ID))
    return selectors.list_alerts(user, only_open=open, team_id=team, run_id=run, condition=condition, limit=limit, cursor=cursor)


@router.get("alerts/unread", summary="Number of unread alerts")
def count_unread_alerts(request: HttpRequest) -> Unread:
    """Unacknowledged alerts since you last opened the list; 100 means more than 99."""
    return {"unread": selectors.unread(caller(request))}


@router.post("alerts/seen", summary="Mark alerts as read")
def mark_alerts_seen(request: HttpRequest, body: SeenBody) -> Unread:
    """Alerts up to this one count as read for you."""
    services.mark_seen(caller(request), body.up_to)
    return {"unread": selectors.unread(caller(request))}


@router.post("alerts/{int:alert_id}/acknowledge", summary="Acknowledge an alert")
def acknowledge_alert(request: HttpRequest, alert_id: AlertId) -> selectors.AlertSummary:
    """For all users; the alert stays open until its condition ends. 403 for viewers."""
    if alert_id > LARGEST_ID:
        raise Alert.DoesNotExist
    user = caller(request)
    services.acknowledge(user, selectors.get_alert(user, alert_id))
    return selectors.summary(selectors.get_alert(user, alert_id))


@router.post("runs/{int:run_id}/silence", summary="Silence or unsilence the alerts of a run")
def silence_run(request: HttpRequest, run_id: RunId, body: SilenceBody) -> runs.RunSummary:
    """Closes open alerts and opens none until the run is unsilenced. 403 if you may not manage the run."""
    services.silence(caller(request), get_run_row(request, run_id).pk, body.silent)
    return get_run_summary(request, run_id)
