"""Creates users, teams and login links; registration; login by link."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import Q

from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.models import LoginLink, Membership, Role, Team, User
from oppo_platform.accounts.one_time_links import find_link, use_link
from oppo_platform.tokens import new_token

TAKEN = "An account with this user name or email address already exists. If it is yours, log in and open the link again."
LOGIN_LINK_HOURS = 24


class AccountError(ValueError):
    """An invalid request about accounts; the message says why."""


@dataclass(frozen=True, slots=True)
class FirstUser:
    """`password` is None if the user existed before."""

    user: User
    password: str | None


@transaction.atomic
def create_user(
    username: str, email: str, team: Team | None = None, role: Role = Role.MEMBER, administers: bool = False
) -> FirstUser:
    """A user with a generated password, in a team if given. Raises `AccountError` if the name or email is taken."""
    if User.objects.filter(Q(username__iexact=username) | Q(email__iexact=email)).exists():
        raise AccountError(f"A user named {username} or with the email {email} already exists.")
    password = secrets.token_urlsafe(15)
    user = User.objects.create_user(username=username, email=email, password=password, is_staff=administers)
    if team is not None:
        Membership.objects.create(team=team, user=user, role=role)
        audit.record(team.pk, audit.SHELL, "member.add", audit.actor_name(user), role=role)
    return FirstUser(user, password)


@transaction.atomic
def create_team(name: str, owner: User) -> Team:
    """A team with its first member. Raises `AccountError` for a name that is empty, too long or taken."""
    name = name.strip()
    if not name or len(name) > 120:
        raise AccountError("A team name must have 1 to 120 characters.")
    if Team.objects.filter(name__iexact=name).exists():
        raise AccountError(f"A team named {name} already exists.")
    team = Team.objects.create(name=name, created_at=clock.now())
    Membership.objects.create(team=team, user=owner, role=Role.OWNER)
    audit.record(team.pk, audit.SHELL, "team.create", name, owner=owner.username)
    return team


def find_user(name: str) -> User:
    """A person, by user name or email. Raises `AccountError` if there is none."""
    user = User.objects.filter(Q(username__iexact=name) | Q(email__iexact=name), service_of__isnull=True).first()
    if user is None:
        raise AccountError(f"There is no user named {name}.")
    return user


def create_login_link(user: User, hours: float = LOGIN_LINK_HOURS) -> str:
    """A URL that logs the user in once, within `hours`."""
    token, now = new_token("login"), clock.now()
    LoginLink.objects.create(
        user=user, prefix=token.prefix, digest=token.digest, created_at=now, expires_at=now + timedelta(hours=hours)
    )
    return f"{settings.OPPO_BASE_URL}/login-link/{token.text}"


@transaction.atomic
def use_login_link(text: str) -> User | None:
    """The user of a valid link, which is then used up."""
    link = find_link(LoginLink.objects.select_related("user").filter(user__is_active=True), text, "login")
    if link is None or not use_link(link):
        return None
    audit.record_for_person(link.user, link.user, "login.link")
    return link.user


def register(username: str, email: str, password: str) -> User:
    """A new account. Raises `AccountError` for a name or address that is invalid or taken, or a weak password."""
    username, email = username.strip(), email.strip()
    if User.objects.filter(Q(username__iexact=username) | Q(email__iexact=email)).exists():
        raise AccountError(TAKEN)
    user = User(username=username, email=email)
    check_password(user, password)
    user.set_password(password)
    try:
        user.full_clean()
        user.save()
    except ValidationError as error:
        raise AccountError(" ".join(f"{field}: {' '.join(told)}" for field, told in error.message_dict.items())) from None
    except IntegrityError:  # the name was taken concurrently
        raise AccountError(TAKEN) from None
    return user


def check_password(user: User, password: str) -> None:
    """Raise `AccountError` if the password is too weak for this person."""
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise AccountError(" ".join(error.messages)) from None
