"""Who may see and do what: the one place that turns a user into teams, projects and runs.

What a user may not see does not exist for them: selectors start from these querysets, so that it ends as a 404.
"""

from __future__ import annotations

from django.db.models import QuerySet

from oppo_platform.accounts.models import Membership, Role, Team, User
from oppo_platform.runs.models import Project, Run

SUBMITTERS = (Role.MEMBER, Role.MAINTAINER, Role.OWNER)
MANAGERS = (Role.MAINTAINER, Role.OWNER)


def _memberships(user: User) -> QuerySet[Membership]:
    own = Membership.objects.filter(user_id=user.pk)
    return own if user.bound_team_id is None else own.filter(team_id=user.bound_team_id)


def visible_teams(user: User) -> QuerySet[Team]:
    """The user's teams, by name."""
    return Team.objects.filter(pk__in=_memberships(user).values("team_id")).order_by("name")


def visible_projects(user: User) -> QuerySet[Project]:
    """Projects of the user's teams, by name."""
    return Project.objects.filter(team_id__in=_memberships(user).values("team_id")).select_related("team").order_by("name", "id")


def visible_runs(user: User) -> QuerySet[Run]:
    """Runs of the user's teams."""
    return Run.objects.filter(project__team_id__in=_memberships(user).values("team_id"))


def administers(user: User) -> bool:
    """Administrators of the cluster drain nodes and set quotas; a token, which belongs to one team, never does."""
    return bool(user.is_active and user.is_staff and user.bound_team_id is None)


def may_submit(user: User, project: Project) -> bool:
    """Members and above submit; viewers look."""
    return _memberships(user).filter(team_id=project.team_id, role__in=SUBMITTERS).exists()


def may_cancel(user: User, run: Run) -> bool:
    """Maintainers cancel any run of the team, members their own."""
    membership = _memberships(user).filter(team_id=run.project.team_id).first()
    if membership is None:
        return False
    return membership.role in MANAGERS or (membership.role == Role.MEMBER and run.user_id == user.pk)
