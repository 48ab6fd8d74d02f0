"""Additional template context of the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import Count, Q

from oppo_contract.wire import CatalogueEntry
from oppo_platform.accounts import one_time_links
from oppo_platform.accounts.access import Action, may_reset_password, memberships, permits, role_in
from oppo_platform.accounts.invites import open_invites
from oppo_platform.accounts.models import PasswordLink, Role, Team, User
from oppo_platform.cluster.models import CatalogueItem
from oppo_platform.cluster.selectors import live_nodes
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import RunSummary
from oppo_platform.telemetry.metric_reader import attempt_ranges_by_run
from oppo_platform.telemetry.selectors import columns

REWARD = "critic/score/mean"
SPARK_POINTS = 40
MOST_CURVES = 4000
_Key = tuple[int, int | None, int, float]
_curves: dict[_Key, tuple[float | None, ...]] = {}


def live_catalogue() -> list[CatalogueEntry]:
    """Models and prompts of the connected workers, by id, each once; with a `problem` if no worker can use it."""
    items = CatalogueItem.objects.filter(node__in=live_nodes()).order_by("kind", "entry_id", "-problem")
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
            weights=i.weights,
            layers=i.layers,
            width=i.width,
            cached=i.cached,
            problem=i.problem,
        )
        for i in items
    }
    return list(entries.values())


def with_curves(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """The summaries, each with `curve`: its mean rewards, downsampled for a sparkline."""
    lacking = [run for run in runs if run["step"] and _key(run) not in _curves]
    if lacking:
        parts = attempt_ranges_by_run(Run(pk=run["id"]) for run in lacking)
        result = columns(parts, {run_id: [REWARD] for run_id in parts}, "step", SPARK_POINTS)
        if len(_curves) > MOST_CURVES:
            _curves.clear()
        _curves.update({_key(run): tuple(result[run["id"]][REWARD]["y"]) for run in lacking})
    return [{**run, "curve": _curves.get(_key(run), ())} for run in runs]


def _key(run: RunSummary) -> _Key:
    """Cache key: a list is rendered every two seconds, but a curve changes only with its run's steps.

    A repeated step comes from another attempt, or in runs of older versions at another time.
    """
    return run["id"], run["attempt"], run["step"], run["elapsed_s"]


def teams_overview(user: User) -> list[dict[str, Any]]:
    """The user's teams by name: `{team, role, members, projects}`, the last two being numbers."""
    own = memberships(user).select_related("team").order_by("team__name")
    people = Count("team__memberships", filter=Q(team__memberships__user__service_of=None), distinct=True)
    counted = own.annotate(members=people, projects=Count("team__projects", distinct=True))
    return [{"team": m.team, "role": m.role, "members": m.members, "projects": m.projects} for m in counted]


def member_page(user: User, team: Team) -> dict[str, Any]:
    """A team's members and projects, and the user's permissions: `{projects, members, roles, may_create, may_manage, invites}`.

    A member is `{user, role, may_reset, open_link}`: whether the user may create a password link for them, and whether
    one is open.
    """
    role = role_in(user, team.pk)
    manages = permits(role, Action.MANAGE_MEMBERS)
    return {
        "projects": team.projects.order_by("name"),
        "members": _members(user, team, manages),
        "roles": Role.values,
        "may_create": permits(role, Action.CREATE_PROJECT),
        "may_manage": manages,
        "invites": open_invites(team) if manages else [],
    }


def _members(viewer: User, team: Team, manages: bool) -> list[dict[str, Any]]:
    result = team.memberships.filter(user__service_of__isnull=True).select_related("user").order_by("user__username")
    opened = set(
        one_time_links.usable(PasswordLink.objects.filter(user__memberships__team=team)).values_list("user_id", flat=True)
    )
    return [
        {
            "user": m.user,
            "role": m.role,
            "may_reset": manages and m.user_id != viewer.pk and may_reset_password(viewer, m.user),
            "open_link": m.user_id in opened,
        }
        for m in result
    ]
