"""Alert rules of a team: the defaults and the team's changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from django.db import transaction

from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.alerts.lifecycle import close_alert, with_related
from oppo_platform.alerts.models import Alert, AlertRule
from oppo_platform.alerts.policy import DEFAULTS, Condition, Rule, rule_error
from oppo_platform.runs.models import Run

Rules = Mapping[Condition, Rule]


def rules_by_team(team_ids: Collection[int]) -> dict[int, Rules]:
    """Every rule of each team, by team id."""
    rules = {team_id: dict(DEFAULTS) for team_id in team_ids}
    for row in AlertRule.objects.filter(team_id__in=rules):
        rules[row.team_id][Condition(row.condition)] = Rule(row.on, row.threshold, row.window_steps)
    return dict(rules)


def team_rules(team_id: int) -> Rules:
    """Every rule of the team."""
    return rules_by_team([team_id])[team_id]


@transaction.atomic
def set_rules(actor: User, team: Team, rules: Rules) -> int:
    """Set some of the team's rules. Returns the number of changed ones.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: a number is out of its limits.
    """
    demand(actor, Action.MANAGE_ALERTS, team.pk)
    errors = [error for condition, rule in rules.items() if (error := rule_error(condition, rule))]
    if errors:
        raise AccountError(" ".join(errors))
    before = team_rules(team.pk)
    changed = {condition: rule for condition, rule in rules.items() if rule != before[condition]}
    for condition, rule in changed.items():
        values = {"on": rule.on, "threshold": rule.threshold, "window_steps": rule.window_steps}
        AlertRule.objects.update_or_create(team=team, condition=condition, defaults=values)
        audit.record(team.pk, actor, "alert.rule", condition, **values)
    disabled = [condition for condition, rule in changed.items() if not rule.on]
    open_alerts = Alert.objects.filter(team=team, closed_at=None, condition__in=disabled)
    for run_id in sorted(set(open_alerts.values_list("run_id", flat=True))):
        run = with_related(Run.objects.select_for_update(of=("self",))).get(pk=run_id)
        for condition in disabled:
            close_alert(run, condition, "The rule was disabled.")
    return len(changed)
