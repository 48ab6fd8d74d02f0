"""Changing a team: its projects, its members and their roles. Who may do what stands here, because it depends on both people."""

from __future__ import annotations

from django.db import transaction

from oppo_platform import clock
from oppo_platform.accounts.access import MANAGERS, SUBMITTERS
from oppo_platform.accounts.models import Membership, Role, Team, User
from oppo_platform.accounts.services import AccountError, find_user
from oppo_platform.runs.models import Project


class NotAllowed(Exception):
    """The acting person's role does not permit this; the message says what it takes."""


def role_in(user: User, team: Team) -> str | None:
    """The user's role in the team; None for who is not a member."""
    return Membership.objects.filter(user=user, team=team).values_list("role", flat=True).first()


@transaction.atomic
def create_project(actor: User, team: Team, name: str) -> Project:
    """A new project of the team. Raises `NotAllowed` for viewers, `AccountError` for a name that is empty or taken."""
    if role_in(actor, team) not in SUBMITTERS:
        raise NotAllowed("A member or above creates projects; viewers look.")
    name = name.strip()
    if not name or len(name) > 120:
        raise AccountError("A project's name has 1 to 120 characters.")
    project, made = Project.objects.get_or_create(team=team, name=name, defaults={"created_at": clock.now()})
    if not made:
        raise AccountError(f"{team.name} has a project called {name} already.")
    return project


@transaction.atomic
def set_member(actor: User, team: Team, who: str, role: str) -> Membership:
    """Add an existing user to the team, or change a member's role.

    Args:
        who: user name or email.
        role: one of `Role`. Only an owner makes owners, or changes one; nobody changes their own role, so that a team
            never loses its last owner.

    Raises:
        NotAllowed: the actor's role does not permit it. AccountError: there is no such user or role.
    """
    own = role_in(actor, team)
    if own not in MANAGERS:
        raise NotAllowed("A maintainer or an owner manages members.")
    if role not in Role.values:
        raise AccountError(f"{role} is no role; there are {', '.join(Role.values)}.")
    user = find_user(who.strip())
    if user.pk == actor.pk:
        raise AccountError("Your own role is changed by another manager of the team.")
    if Role.OWNER in (role, role_in(user, team)) and own != Role.OWNER:
        raise NotAllowed("Only an owner makes somebody an owner, or changes an owner's role.")
    membership, _ = Membership.objects.update_or_create(team=team, user=user, defaults={"role": role})
    return membership
