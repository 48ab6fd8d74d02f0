"""Hooks of alerts in the app `runs`: an `Ending` at a run's end, the alerts of a run summary, and the filter `alert:`."""

from __future__ import annotations

from django.db.models import Q

from oppo_platform.alerts.evaluator import announce_node_failure
from oppo_platform.alerts.models import Alert, Ending
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.selectors import open_alerts, silent
from oppo_platform.runs import filtering, selectors, transitions

ANY_ALERT = "any"


def register() -> None:
    """Register the hooks, once when Django starts."""
    transitions.ON_END.append(lambda run_id: Ending.objects.create(run_id=run_id))
    transitions.ON_REOPEN.append(_withdraw_end)
    transitions.ON_NODE_FAILED.append(announce_node_failure)
    selectors.ANNOTATIONS.update(open_alerts=open_alerts, is_silent=silent)
    description = "an open alert: a condition, or any"
    filtering.ADDED_FIELDS["alert"] = filtering.Field(description, [ANY_ALERT, *Condition], _with_alert)


def _withdraw_end(run_id: int) -> None:
    """An end that was not announced yet is none."""
    Ending.objects.filter(pk=run_id).delete()


def _with_alert(value: str) -> Q:
    alerts = Alert.objects.filter(closed_at=None, **({} if value == ANY_ALERT else {"condition": value}))
    return Q(pk__in=alerts.values("run_id"))
