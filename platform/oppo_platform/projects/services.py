"""Creates projects, and the first user with a team and a project."""

from __future__ import annotations

import secrets

from django.db import transaction

from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import Team, User
from oppo_platform.accounts.services import AccountError, FirstUser, create_team
from oppo_platform.projects.models import Project

DEFAULT_TEAM = "Main"
DEFAULT_PROJECT = "Default"


@transaction.atomic
def create_project(actor: User, team: Team, name: str) -> Project:
    """A new project of the team. Raises `PermissionDenied` for viewers, `AccountError` for a name that is empty or taken."""
    demand(actor, Action.CREATE_PROJECT, team.pk)
    name = name.strip()
    if not name or len(name) > 120 or "\0" in name:
        raise AccountError("A project name must have 1 to 120 characters without NUL.")
    project, made = Project.objects.get_or_create(team=team, name=name, defaults={"created_at": clock.now()})
    if not made:
        raise AccountError(f"{team.name} already has a project named {name}.")
    audit.record(team.pk, actor, "project.create", name)
    return project


@transaction.atomic
def ensure_first_user(username: str = "admin", email: str = "admin@localhost.localdomain") -> FirstUser:
    """The installation's first user, cluster administrator and owner of the first team; created if missing.

    Returns the generated password once, at creation.
    """
    existing = User.objects.order_by("id").first()
    if existing is not None:
        if not User.objects.filter(is_staff=True).exists():  # created before there were administrators
            User.objects.filter(pk=existing.pk).update(is_staff=True)
        return FirstUser(existing, None)
    password = secrets.token_urlsafe(15)
    user = User.objects.create_user(username=username, email=email, password=password, is_staff=True)
    team = create_team(DEFAULT_TEAM, owner=user)
    Project.objects.create(team=team, name=DEFAULT_PROJECT, created_at=clock.now())
    return FirstUser(user, password)
