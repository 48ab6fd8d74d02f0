"""A team's rules: the defaults with its changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from django.db import transaction

from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.alerts.lifecycle import close_alert, joined
from oppo_platform.alerts.models import Alert, AlertRule
from oppo_platform.alerts.policy import DEFAULTS, Condition, Rule, problem_with
from oppo_platform.runs.models import Run

Rules = Mapping[Condition, Rule]


def rules_by_team(team_ids: Collection[int]) -> dict[int, Rules]:
    """Every rule of each team, by team id."""
    result = {team_id: dict(DEFAULTS) for team_id in team_ids}
    for row in AlertRule.objects.filter(team_id__in=result):
        result[row.team_id][Condition(row.condition)] = Rule(row.on, row.threshold, row.window_steps)
    return dict(result)


def team_rules(team_id: int) -> Rules:
    """Every rule of the team."""
    return rules_by_team([team_id])[team_id]


@transaction.atomic
def set_rules(actor: User, team: Team, new_rules: Rules) -> int:
    """Change some of the team's rules. Returns how many are different now.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: a number is out of bounds.
    """
    demand(actor, Action.MANAGE_ALERTS, team.pk)
    problems = [problem for condition, rule in new_rules.items() if (problem := problem_with(condition, rule))]
    if problems:
        raise AccountError(" ".join(problems))
    before = team_rules(team.pk)
    changed = {condition: rule for condition, rule in new_rules.items() if rule != before[condition]}
    for condition, rule in changed.items():
        values = {"on": rule.on, "threshold": rule.threshold, "window_steps": rule.window_steps}
        AlertRule.objects.update_or_create(team=team, condition=condition, defaults=values)
        audit.record(team.pk, actor, "alert.rule", condition, **values)
    _close(team, [condition for condition, rule in changed.items() if not rule.on])
    return len(changed)


def _close(team: Team, conditions: Sequence[Condition]) -> None:
    """Close open alerts of disabled conditions, one run after another."""
    result = Alert.objects.filter(team=team, closed_at=None, condition__in=conditions)
    for run_id in sorted(set(result.values_list("run_id", flat=True))):
        run = joined(Run.objects.select_for_update(of=("self",))).get(pk=run_id)
        for condition in conditions:
            close_alert(run, condition, "The rule was disabled.")
