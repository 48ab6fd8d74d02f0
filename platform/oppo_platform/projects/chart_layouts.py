"""Pinned charts of a project's runs: each user's own, or else those that a member saved for the project."""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction
from typing_extensions import TypedDict

from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import User
from oppo_platform.projects.access import may_submit
from oppo_platform.projects.models import ChartLayout, Project


class Chart(TypedDict):
    """A pinned chart: the metrics in it, a title (empty: their names), and whether its y axis is logarithmic."""

    title: str
    keys: list[str]
    log: bool


class Layout(TypedDict):
    """Pinned charts in order. `own`: whether they are the user's; `shared`: whether the project has some, to go back to."""

    project: int
    charts: list[Chart]
    own: bool
    shared: bool
    may_share: bool


def chart_layout(user: User, project: Project) -> Layout:
    """The charts that the user sees."""
    saved = {layout.user_id: layout.charts for layout in ChartLayout.objects.filter(project=project, user=None)}
    saved |= {layout.user_id: layout.charts for layout in ChartLayout.objects.filter(project=project, user_id=user.pk)}
    return Layout(
        project=project.pk,
        charts=saved.get(user.pk, saved.get(None, [])),
        own=user.pk in saved,
        shared=None in saved,
        may_share=may_submit(user, project),
    )


def save_charts(user: User, project: Project, charts: Sequence[Chart]) -> Layout:
    """Save the user's own charts."""
    ChartLayout.objects.update_or_create(project=project, user_id=user.pk, defaults={"charts": list(charts)})
    return chart_layout(user, project)


@transaction.atomic
def share_charts(user: User, project: Project, charts: Sequence[Chart]) -> Layout:
    """Save charts for the project; the user's own are dropped, so that they follow later changes. Raises `PermissionDenied`."""
    demand(user, Action.SUBMIT, project.team_id)
    ChartLayout.objects.update_or_create(project=project, user=None, defaults={"charts": list(charts)})
    ChartLayout.objects.filter(project=project, user_id=user.pk).delete()
    return chart_layout(user, project)


def reset_charts(user: User, project: Project) -> Layout:
    """Drop the user's own charts: they see the project's."""
    ChartLayout.objects.filter(project=project, user_id=user.pk).delete()
    return chart_layout(user, project)
