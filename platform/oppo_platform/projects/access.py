"""Which projects a user may see and submit to, by the roles of `accounts.access`."""

from __future__ import annotations

from django.db.models import QuerySet

from oppo_platform.accounts.access import Action, cap_role, may, memberships, permits
from oppo_platform.accounts.models import Role, User
from oppo_platform.projects.models import Project


def visible_projects(user: User) -> QuerySet[Project]:
    """Projects of the user's teams, by name."""
    return Project.objects.filter(team_id__in=memberships(user).values("team_id")).select_related("team").order_by("name", "id")


def submit_projects(user: User) -> QuerySet[Project]:
    """Projects that the user may submit to, by team and name."""
    roles = [role for role in Role if permits(cap_role(user, role), Action.SUBMIT)]
    teams = memberships(user).filter(role__in=roles).values("team_id")
    return Project.objects.filter(team_id__in=teams).select_related("team").order_by("team__name", "name")


def may_submit(user: User, project: Project) -> bool:
    """Members and above submit; viewers may only read."""
    return may(user, Action.SUBMIT, project.team_id)
