"""Making users, teams, login links and API tokens; using a login link."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Q

from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.links import spend, wanted
from oppo_platform.accounts.models import ApiToken, LoginLink, Membership, Role, Team, User
from oppo_platform.runs.models import Project
from oppo_platform.tokens import new_token, parse_token, same_digest

LOGIN_LINK_HOURS = 24
DEFAULT_TEAM = "Main"
DEFAULT_PROJECT = "Default"


class AccountError(ValueError):
    """A wish about accounts that cannot be fulfilled; the message says why."""


@dataclass(frozen=True, slots=True)
class FirstUser:
    """`password` is None when the user existed before and kept theirs."""

    user: User
    password: str | None


@transaction.atomic
def ensure_first_user(username: str = "admin", email: str = "admin@localhost.localdomain") -> FirstUser:
    """The installation's first user, administrator of the cluster and owner of the first team; made when there is none.

    Returns the generated password once, at birth.
    """
    existing = User.objects.order_by("id").first()
    if existing is not None:
        if not User.objects.filter(is_staff=True).exists():  # made before there were administrators
            User.objects.filter(pk=existing.pk).update(is_staff=True)
        return FirstUser(existing, None)
    password = secrets.token_urlsafe(15)
    user = User.objects.create_user(username=username, email=email, password=password, is_staff=True)
    team = create_team(DEFAULT_TEAM, owner=user)
    Project.objects.create(team=team, name=DEFAULT_PROJECT, created_at=clock.now())
    return FirstUser(user, password)


@transaction.atomic
def create_user(
    username: str, email: str, team: Team | None = None, role: Role = Role.MEMBER, administers: bool = False
) -> FirstUser:
    """A user with a generated password, in a team if given. Raises `AccountError` when the name or email is taken."""
    if User.objects.filter(Q(username__iexact=username) | Q(email__iexact=email)).exists():
        raise AccountError(f"A user called {username} or with the email {email} exists already.")
    password = secrets.token_urlsafe(15)
    user = User.objects.create_user(username=username, email=email, password=password, is_staff=administers)
    if team is not None:
        Membership.objects.create(team=team, user=user, role=role)
        audit.record(team.pk, audit.SHELL, "member.add", audit.actor_of(user), role=role)
    return FirstUser(user, password)


@transaction.atomic
def create_team(name: str, owner: User) -> Team:
    """A team with its first member. Raises `AccountError` for a name that is empty, too long or taken."""
    name = name.strip()
    if not name or len(name) > 120:
        raise AccountError("A team's name has 1 to 120 characters.")
    if Team.objects.filter(name__iexact=name).exists():
        raise AccountError(f"There is a team called {name} already.")
    team = Team.objects.create(name=name, created_at=clock.now())
    Membership.objects.create(team=team, user=owner, role=Role.OWNER)
    audit.record(team.pk, audit.SHELL, "team.create", name, owner=owner.username)
    return team


def find_user(name: str) -> User:
    """By user name or email. Raises `AccountError` when there is none."""
    user = User.objects.filter(Q(username__iexact=name) | Q(email__iexact=name)).first()
    if user is None:
        raise AccountError(f"There is no user called {name}.")
    return user


def create_login_link(user: User, hours: float = LOGIN_LINK_HOURS) -> str:
    """An address that logs the user in once, within `hours`."""
    token, now = new_token("login"), clock.now()
    LoginLink.objects.create(
        user=user, prefix=token.prefix, digest=token.digest, created_at=now, expires_at=now + timedelta(hours=hours)
    )
    return f"{settings.OPPO_BASE_URL}/login-link/{token.text}"


@transaction.atomic
def use_login_link(text: str) -> User | None:
    """The user whose link this is, if it is valid; it never is again."""
    link = wanted(LoginLink.objects.select_related("user").filter(user__is_active=True), text, "login")
    if link is None or not spend(link):
        return None
    audit.record_for_person(link.user, link.user, "login.link")
    return link.user


@transaction.atomic
def create_api_token(user: User, team: Team, name: str, days: float | None = None) -> str:
    """A token for the API, shown once. Raises `AccountError` when the user is not in the team."""
    if not Membership.objects.filter(user=user, team=team).exists():
        raise AccountError(f"{user.username} is not a member of {team.name}.")
    token, now = new_token("api"), clock.now()
    expires_at = now + timedelta(days=days) if days is not None else None
    ApiToken.objects.create(
        user=user, team=team, name=name, prefix=token.prefix, digest=token.digest, created_at=now, expires_at=expires_at
    )
    audit.record(team.pk, audit.SHELL, "token.create", name, of=user.username, days=days)
    return token.text


def user_of_api_token(text: str) -> User | None:
    """The user that a token stands for, narrowed to the token's team; None when it is not valid."""
    parsed = parse_token(text, "api")
    token = ApiToken.objects.select_related("user").filter(prefix=parsed[0], revoked_at__isnull=True).first() if parsed else None
    if parsed is None or token is None or not same_digest(token.digest, parsed[1]) or not token.user.is_active:
        return None
    now = clock.now()
    if token.expires_at is not None and token.expires_at <= now:
        return None
    # To the minute is enough, and spares a write a request.
    if token.last_used_at is None or now - token.last_used_at > timedelta(minutes=1):
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)
    token.user.bound_team_id = token.team_id
    return token.user
