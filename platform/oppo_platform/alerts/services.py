"""User actions on alerts: acknowledge, silence a run, set mail preferences."""

from __future__ import annotations

from collections.abc import Sequence

from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.db.models import F

from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.alerts.lifecycle import close_all
from oppo_platform.alerts.models import Alert, MailChoice, SeenAlerts, Silence
from oppo_platform.alerts.policy import Condition
from oppo_platform.notify import run_changed
from oppo_platform.runs.access import may_manage
from oppo_platform.runs.models import Change, Run


@transaction.atomic
def acknowledge(actor: User, alert: Alert) -> bool:
    """Acknowledge an alert for all users: it no longer counts as unread. False if it was acknowledged before.

    Raises:
        PermissionDenied: the actor is a viewer.
    """
    demand(actor, Action.SUBMIT, alert.team_id)
    # The run is locked first, as everywhere: its cursor is updated, too.
    Run.objects.select_for_update().only("pk").get(pk=alert.run_id)
    now = clock.now()
    fresh = Alert.objects.filter(pk=alert.pk, acknowledged_at=None).update(acknowledged_at=now, acknowledged_by=actor)
    if fresh:
        Run.objects.filter(pk=alert.run_id).update(cursor=F("cursor") + 1)
        run_changed(alert.run_id)
    alert.refresh_from_db(fields=["acknowledged_at", "acknowledged_by"])
    return bool(fresh)


@transaction.atomic
def silence(actor: User, run_id: int, silent: bool) -> bool:
    """Silence the alerts of a run, which closes open ones, or unsilence them. Returns whether this is a change.

    Raises:
        PermissionDenied: the actor may not steer the run.
    """
    run = Run.objects.select_for_update(of=("self",)).select_related("project__team", "user").get(pk=run_id)
    if not may_manage(actor, run):
        raise PermissionDenied("Only maintainers can silence other users' runs.")
    if silent == Silence.objects.filter(run=run).exists():
        return False
    if silent:
        Silence.objects.create(run=run, user=actor, at=clock.now())
        close_all(run, f"{actor.username} silenced the run.")
    else:
        Silence.objects.filter(run=run).delete()
    reason = "Alerts silenced." if silent else "Alerts unsilenced."
    Change.objects.create(run=run, what="alerts", reason=reason, actor=audit.actor_name(actor), at=clock.now())
    audit.record(run.project.team_id, actor, "run.change", f"run {run.pk} {run.name}", silent=silent)
    Run.objects.filter(pk=run.pk).update(cursor=F("cursor") + 1)
    run_changed(run.pk)
    return True


@transaction.atomic
def choose_mail(actor: User, team: Team, whose: str, conditions: Sequence[str]) -> MailChoice:
    """Set the actor's mail preferences for a team's runs.

    Raises:
        PermissionDenied: the actor is not in the team. AccountError: unknown choice or condition.
    """
    demand(actor, Action.READ, team.pk)
    if whose not in MailChoice.Whose.values:
        raise AccountError(f"Must be one of {', '.join(MailChoice.Whose.values)}.")
    values = {"whose": whose, "conditions": parse_conditions(conditions)}
    choice, _ = MailChoice.objects.update_or_create(user=actor, team=team, defaults=values)
    return choice


def parse_conditions(names: Sequence[str]) -> list[str]:
    """The named conditions in their standard order. Raises `AccountError` for an unknown name."""
    unknown = [name for name in names if name not in set(Condition)]
    if unknown:
        raise AccountError(f"Unknown condition {unknown[0][:40]}.")
    return [condition.value for condition in Condition if condition.value in names]


def mark_seen(user: User, up_to: int) -> None:
    """Record that the user has seen the list up to this alert; never decreases."""
    with transaction.atomic():
        seen, _ = SeenAlerts.objects.select_for_update().get_or_create(user_id=user.pk, defaults={"up_to": up_to})
        if seen.up_to < up_to:
            seen.up_to = up_to
            seen.save(update_fields=["up_to"])
