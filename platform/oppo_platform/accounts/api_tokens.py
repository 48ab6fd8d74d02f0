"""Tokens for programs: personal ones, which act as the person who made them, and service ones, which belong to a team.

A token belongs to one team and has a scope, which caps the role that its holder has there (`access.CAP`). A service token acts
as an account of its own that nobody can log in to, so that a nightly job goes on when the person who set it up leaves.

Guarantees: the text of a token is returned once and kept as an HMAC; a revoked, expired or orphaned token is refused from the
next request on; nobody makes a token that may do more than they may.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet

from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand, may, memberships, within
from oppo_platform.accounts.models import ApiToken, Membership, Role, Scope, Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.tokens import new_token, parse_token, same_digest

LONGEST_DAYS = 3650
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,59}")
NAME_WORDS = "1 to 60 letters, digits, spaces, dots, dashes and underscores, starting with a letter or digit"
SERVICE_ROLE = {Scope.READ: Role.VIEWER, Scope.SUBMIT: Role.MEMBER}
MOST_TOKENS = 50


@dataclass(frozen=True, slots=True)
class Made:
    """A token at its birth; `text` is shown once."""

    token: ApiToken
    text: str


@transaction.atomic
def create_api_token(
    user: User, team: Team, name: str, days: float | None = None, scope: str = Scope.SUBMIT, by: User | str = audit.SHELL
) -> Made:
    """A personal token of `user` for a team; without `days` it never expires.

    Raises:
        AccountError: the user is not in the team, or has no role for the scope; the name, the validity or the scope will not do;
            there are too many.
    """
    role = Membership.objects.filter(user=user, team=team).values_list("role", flat=True).first()
    if role is None:
        raise AccountError(f"{user.username} is not a member of {team.name}.")
    chosen = _scope(scope)
    if chosen == Scope.SUBMIT and role == Role.VIEWER:
        raise AccountError("A viewer's token can only have the scope read.")
    return _create(user, team, name, days, chosen, by)


@transaction.atomic
def create_own_token(actor: User, team: Team, name: str, days: float | None, scope: str) -> Made:
    """As `create_api_token`, for oneself. Raises `PermissionDenied` when it is asked for with a token of less scope."""
    within(actor, Scope.ADMIN)
    return create_api_token(actor, team, name, days, scope, by=actor)


@transaction.atomic
def create_service_token(actor: User, team: Team, name: str, days: float | None, scope: str) -> Made:
    """A token of the team itself, with an account of its own: a viewer's role to read, a member's to submit.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: as `create_api_token`; a service is never given `admin`.
    """
    demand(actor, Action.MANAGE_TOKENS, team.pk)
    chosen = _scope(scope)
    if chosen not in SERVICE_ROLE:
        raise AccountError(f"A service token can only have the scope {' or '.join(SERVICE_ROLE)}.")
    name = _name(name)
    service = _account(team, name)
    Membership.objects.create(team=team, user=service, role=SERVICE_ROLE[chosen])
    return _create(service, team, name, days, chosen, actor)


def _account(team: Team, name: str) -> User:
    """An account for a service."""
    while True:
        service = User(username=_account_name(team, name), email=f"{new_token('api').prefix}@service.invalid", service_of=team)
        service.set_unusable_password()
        try:
            with transaction.atomic():
                service.save()
        except IntegrityError:  # somebody else has taken this name just now; the next one is chosen
            continue
        return service


def _account_name(team: Team, name: str) -> str:
    """How the audit log and the list of runs call it; unique, also after an earlier one of that name is gone."""
    stem = f"{re.sub(r'[^a-z0-9._-]+', '-', name.lower())}.service"
    taken = set(User.objects.filter(username__startswith=stem).values_list("username", flat=True))
    return next(each for n in range(len(taken) + 1) if (each := stem + (f"-{n + 1}" if n else "")) not in taken)


def _create(user: User, team: Team, name: str, days: float | None, scope: Scope, by: User | str) -> Made:
    name, now = _name(name), clock.now()
    if days is not None and not 0 < days <= LONGEST_DAYS:
        raise AccountError(f"A token is valid for at most {LONGEST_DAYS:,} days, or never expires.")
    if living(ApiToken.objects.filter(user=user, team=team)).count() >= MOST_TOKENS:
        raise AccountError(f"There are already {MOST_TOKENS} tokens. Revoke unused ones.")
    text = new_token("api")
    token = ApiToken.objects.create(
        user=user, team=team, name=name, scope=scope, prefix=text.prefix, digest=text.digest, created_at=now,
        expires_at=now + timedelta(days=days) if days is not None else None,
    )  # fmt: skip
    audit.record(team.pk, by, "token.create", name, of=user.username, days=days, scope=scope)
    return Made(token, text.text)


def _name(name: str) -> str:
    name = name.strip()
    if not NAME.fullmatch(name):
        raise AccountError(f"A token name must have {NAME_WORDS}.")
    return name


def _scope(scope: str) -> Scope:
    if scope not in Scope.values:
        raise AccountError(f"{scope[:40]} is not a scope; scopes are {', '.join(Scope.values)}.")
    return Scope(scope)


def living(tokens: QuerySet[ApiToken]) -> QuerySet[ApiToken]:
    """Those that are neither revoked nor expired."""
    return tokens.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=clock.now()), revoked_at__isnull=True)


def tokens_of(user: User, team_id: int | None = None) -> QuerySet[ApiToken]:
    """The user's living tokens, and every one of the teams that they own; newest first, service tokens last."""
    teams = [m.team_id for m in memberships(user) if may(user, Action.MANAGE_TOKENS, m.team_id)]
    own = Q(user_id=user.pk, team_id__in=memberships(user).values("team_id"))
    found = living(ApiToken.objects.select_related("user", "team").filter(own | Q(team_id__in=teams)))
    return (found if team_id is None else found.filter(team_id=team_id)).order_by("user__service_of", "-id")


@transaction.atomic
def revoke_token(actor: User, token_id: int) -> ApiToken:
    """Void a token at once; a service's account goes with it.

    Raises:
        ApiToken.DoesNotExist: there is no such token, or it is not the actor's and not of a team that they own.
        PermissionDenied: it is asked for with a token of less scope.
    """
    token = tokens_of(actor).select_for_update(of=("self",)).get(pk=token_id)
    if token.pk != actor.bound_token_id:  # any token may end itself
        within(actor, Scope.ADMIN)
    token.revoked_at = clock.now()
    token.save(update_fields=["revoked_at"])
    if token.user.service_of_id is not None:
        Membership.objects.filter(user=token.user).delete()
        User.objects.filter(pk=token.user_id).update(is_active=False)
    audit.record(token.team_id, actor, "token.revoke", token.name, of=token.user.username)
    return token


@transaction.atomic
def supersede(user: User, name: str) -> None:
    """Void a person's tokens of this name, before `oppo up` makes its next one."""
    for token in living(ApiToken.objects.select_for_update().filter(user=user, name=name)):
        ApiToken.objects.filter(pk=token.pk).update(revoked_at=clock.now())
        audit.record(token.team_id, audit.SHELL, "token.revoke", name, of=user.username)


def user_of_api_token(text: str) -> User | None:
    """The user that a token stands for, narrowed to the token's team and scope; None when it is not valid."""
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
    token.user.bound_team_id, token.user.bound_scope, token.user.bound_token_id = token.team_id, Scope(token.scope), token.pk
    return token.user
