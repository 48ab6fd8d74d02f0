"""Roles and permissions of a user in their teams (`projects.access` and `runs.access` build on it).

Objects that a user may not see do not exist for them: selectors start from these querysets, so the result is a 404. Forbidden
actions on visible objects are a 403. Deny by default: only `LEAST_ROLE` grants.
"""

from __future__ import annotations

from enum import StrEnum

from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet

from oppo_platform.accounts.models import Membership, Role, Scope, Team, User


class Action(StrEnum):
    """Actions in a team; the texts complete "A maintainer or above may …"."""

    READ = "view the team's runs"
    SUBMIT = "submit runs and control their own"
    DOWNLOAD = "download checkpoints"
    CREATE_PROJECT = "create projects"
    NAME_SECRETS = "list secrets"
    STEER_ANY_RUN = "control other users' runs"
    MANAGE_MEMBERS = "manage members, invites and password links"
    MANAGE_SECRETS = "manage secrets"
    MANAGE_STORAGE = "set retention rules"
    MANAGE_ALERTS = "manage alert rules and webhooks"
    MANAGE_TOKENS = "create service tokens, and list and revoke all tokens"
    SEE_AUDIT_LOG = "read the audit log"


# Each role includes the previous ones.
RANK = {role: rank for rank, role in enumerate((Role.VIEWER, Role.MEMBER, Role.MAINTAINER, Role.OWNER))}
LEAST_ROLE = {
    Action.READ: Role.VIEWER,
    Action.SUBMIT: Role.MEMBER,
    Action.DOWNLOAD: Role.MEMBER,
    Action.CREATE_PROJECT: Role.MEMBER,
    Action.NAME_SECRETS: Role.MEMBER,
    Action.STEER_ANY_RUN: Role.MAINTAINER,
    Action.MANAGE_MEMBERS: Role.OWNER,
    Action.MANAGE_SECRETS: Role.OWNER,
    Action.MANAGE_STORAGE: Role.OWNER,
    Action.MANAGE_ALERTS: Role.OWNER,
    Action.MANAGE_TOKENS: Role.OWNER,
    Action.SEE_AUDIT_LOG: Role.OWNER,
}
# A token caps its user's role: its scope never grants more.
CAP = {Scope.READ: Role.VIEWER, Scope.SUBMIT: Role.MAINTAINER, Scope.ADMIN: Role.OWNER}


def permits(role: str | None, action: Action) -> bool:
    """Whether a role suffices for an action; no role suffices for none."""
    return role is not None and RANK[Role(role)] >= RANK[LEAST_ROLE[action]]


def granting_roles(action: Action) -> list[Role]:
    """Roles that permit it, the least first."""
    return [role for role in RANK if permits(role, action)]


def memberships(user: User) -> QuerySet[Membership]:
    """The user's memberships; by an API token, only the one in the token's team."""
    own = Membership.objects.filter(user_id=user.pk)
    return own if user.bound_team_id is None else own.filter(team_id=user.bound_team_id)


def role_in(user: User, team_id: int) -> str | None:
    """The user's role in a team; None for non-members. With an API token, at most what its scope allows."""
    return cap_role(user, memberships(user).filter(team_id=team_id).values_list("role", flat=True).first())


def roles(user: User) -> dict[int, str]:
    """Team id → role, as `role_in`, of all the user's teams with one query."""
    return {team_id: str(cap_role(user, role)) for team_id, role in memberships(user).values_list("team_id", "role")}


def cap_role(user: User, role: str | None) -> str | None:
    """The role, or with an API token at most what its scope allows."""
    if role is None or user.bound_scope is None:
        return role
    return min(Role(role), CAP[user.bound_scope], key=lambda each: RANK[each])


def require_scope(user: User, scope: Scope) -> None:
    """Raise `PermissionDenied` if the request's token has less than this scope."""
    held = user.bound_scope
    if held is not None and list(Scope).index(held) < list(Scope).index(scope):
        raise PermissionDenied(f"This token has the scope {held}; this request needs {scope}. Create tokens on the team's page.")


def may(user: User, action: Action, team_id: int) -> bool:
    """Whether the user's role in the team suffices."""
    return permits(role_in(user, team_id), action)


def demand(user: User, action: Action, team_id: int) -> None:
    """Raise `PermissionDenied`, naming the required roles, unless the user may."""
    if not may(user, action, team_id):
        least = LEAST_ROLE[action]
        raise PermissionDenied(f"{'An' if least == Role.OWNER else 'A'} {least}{_above(least)} may {action}.")


def _above(least: Role) -> str:
    return "" if least == Role.OWNER else " or above"


def visible_teams(user: User) -> QuerySet[Team]:
    """The user's teams, by name."""
    return Team.objects.filter(pk__in=memberships(user).values("team_id")).order_by("name")


def administers(user: User) -> bool:
    """Cluster administrators drain nodes and set quotas; never a token, which belongs to one team."""
    return bool(user.is_active and user.is_staff and user.bound_team_id is None)


def may_reset_password(actor: User, user: User) -> bool:
    """A password link gives access to the account, so it takes an owner of every team of that person.

    Cluster administrators may for anybody, and only they for each other.
    """
    if user.service_of_id is not None:
        return False
    if administers(actor) or user.is_staff:
        return administers(actor)
    owned = memberships(actor).filter(role=Role.OWNER).values("team_id")
    theirs = Membership.objects.filter(user=user)
    return theirs.exists() and not theirs.exclude(team_id__in=owned).exists()
