"""Hooks of alerts in runs: an `Ending` at a run's end, the alerts of a summary, and the filter `alert:`."""

from __future__ import annotations

from django.db.models import Q

from oppo_platform.alerts.models import Alert, Ending
from oppo_platform.alerts.policy import Condition
from oppo_platform.alerts.selectors import open_alerts, silent
from oppo_platform.runs import filtering, selectors, transitions

ANY_ALERT = "any"


def register() -> None:
    """Called once when Django starts."""
    transitions.ON_END.append(note_end)
    selectors.ANNOTATIONS.update(open_alerts=open_alerts, is_silent=silent)
    says = "an open alert: a condition, or any"
    filtering.ADDED_FIELDS["alert"] = filtering.Field(says, [ANY_ALERT, *Condition], _with_alert)


def note_end(run_id: int) -> None:
    """Let the evaluator announce the run's end. Inside the transaction of the end."""
    Ending.objects.create(run_id=run_id)


def _with_alert(value: str) -> Q:
    matching = Alert.objects.filter(closed_at=None, **({} if value == ANY_ALERT else {"condition": value}))
    return Q(pk__in=matching.values("run_id"))
