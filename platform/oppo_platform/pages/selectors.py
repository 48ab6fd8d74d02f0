"""What the pages show beside the summaries that other parts already give."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from django.db.models import QuerySet

from oppo_contract.wire import CatalogueEntry
from oppo_platform.accounts.access import MANAGERS, SUBMITTERS
from oppo_platform.accounts.models import Membership, Role, Team, User
from oppo_platform.cluster.models import CatalogueItem
from oppo_platform.cluster.selectors import live_nodes
from oppo_platform.runs.models import Project, Run
from oppo_platform.runs.selectors import RunSummary
from oppo_platform.telemetry.selectors import metrics

REWARD = "critic/score/mean"
SPARK_POINTS = 40


def live_catalogue() -> list[CatalogueEntry]:
    """Models and prompts that some connected worker can read, by id, each once."""
    items = CatalogueItem.objects.filter(node__in=live_nodes()).order_by("kind", "entry_id")
    entries = {
        (i.kind, i.entry_id): CatalogueEntry(
            id=i.entry_id,
            kind=i.kind,  # type: ignore[arg-type]  # written from a CatalogueEntry
            bytes=i.bytes,
            architecture=i.architecture,
            task=i.task,  # type: ignore[arg-type]
            tokenizer_digest=i.tokenizer_digest,
            context=i.context,
            vocab=i.vocab,
            rows=i.rows,
        )
        for i in items
    }
    return list(entries.values())


def submit_projects(user: User) -> QuerySet[Project]:
    """Projects that the user may submit to, by team and name."""
    teams = Membership.objects.filter(user=user, role__in=SUBMITTERS).values("team_id")
    return Project.objects.filter(team_id__in=teams).select_related("team").order_by("team__name", "name")


def with_curves(runs: Iterable[RunSummary]) -> list[dict[str, Any]]:
    """The summaries, each with `curve`: its mean rewards, thinned out for a sparkline."""
    return [{**run, "curve": _reward_curve(run["id"], run["step"])} for run in runs]


@lru_cache(maxsize=4000)
def _reward_curve(run_id: int, step: int) -> tuple[float | None, ...]:
    # A list is drawn again every two seconds, but a curve only grows with its run's steps: the step is part of the key.
    if step == 0:
        return ()
    series = metrics(Run(pk=run_id, step=step), [REWARD], max_points=SPARK_POINTS)["series"]
    return tuple(series[REWARD]["y"])


def teams_with_members(user: User) -> list[dict[str, Any]]:
    """The user's teams by name: `{team, role, may_submit, may_manage, roles, memberships, projects}`.

    `roles` are those that the user may give.
    """
    own = Membership.objects.filter(user=user).select_related("team").order_by("team__name")
    return [
        {
            "team": membership.team,
            "role": membership.role,
            "may_submit": membership.role in SUBMITTERS,
            "may_manage": membership.role in MANAGERS,
            "roles": [role for role in Role.values if membership.role == Role.OWNER or role != Role.OWNER],
            "memberships": _members(membership.team),
            "projects": membership.team.projects.order_by("name"),
        }
        for membership in own
    ]


def _members(team: Team) -> QuerySet[Membership]:
    return team.memberships.select_related("user").order_by("user__username")
