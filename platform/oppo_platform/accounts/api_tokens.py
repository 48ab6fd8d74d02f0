"""API tokens: personal ones, which act as their creator, and service ones, which belong to a team.

A token belongs to one team and has a scope, which caps its holder's role there (`access.CAP`). A service token has an account of
its
own without login, so that a nightly job continues when its creator leaves.

Guarantees: a token's text is returned once and stored as an HMAC; a revoked, expired or orphaned token is refused from the next
request on; nobody can create a token with more rights than their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta

from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet

from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand, may, memberships, require_scope
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
    """A new token; `text` is shown once."""

    token: ApiToken
    text: str


@transaction.atomic
def create_api_token(
    user: User, team: Team, name: str, days: float | None = None, scope: str = Scope.SUBMIT, by: User | str = audit.SHELL
) -> Made:
    """A personal token of `user` for a team; without `days` it never expires.

    Raises:
        AccountError: the user is not in the team, or has no role for the scope; the name, validity or scope is
        invalid; there are
            too many.
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
    """As `create_api_token`, for oneself. Raises `PermissionDenied` for a request with a token of less scope."""
    require_scope(actor, Scope.ADMIN)
    return create_api_token(actor, team, name, days, scope, by=actor)


@transaction.atomic
def create_service_token(actor: User, team: Team, name: str, days: float | None, scope: str) -> Made:
    """A token of the team, with an account of its own: a viewer's role to read, a member's to submit.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: as `create_api_token`; a service never gets `admin`.
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
    """An account for a service token."""
    while True:
        service = User(username=_account_name(team, name), email=f"{new_token('api').prefix}@service.invalid", service_of=team)
        service.set_unusable_password()
        try:
            with transaction.atomic():
                service.save()
        except IntegrityError:  # the name was taken concurrently; the next one is chosen
            continue
        return service


def _account_name(team: Team, name: str) -> str:
    """Its name in the audit log and the list of runs; unique, also after an earlier one is deleted."""
    stem = f"{re.sub(r'[^a-z0-9._-]+', '-', name.lower())}.service"
    taken = set(User.objects.filter(username__startswith=stem).values_list("username", flat=True))
    return next(each for n in range(len(taken) + 1) if (each := stem + (f"-{n + 1}" if n else "")) not in taken)


def _create(user: User, team: Team, name: str, days: float | None, scope: Scope, by: User | str) -> Made:
    name, now = _name(name), clock.now()
    if days is not None and not 0 < days <= LONGEST_DAYS:
        raise AccountError(f"A token is valid for at most {LONGEST_DAYS:,} days, or never expires.")
    if valid_tokens(ApiToken.objects.filter(user=user, team=team)).count() >= MOST_TOKENS:
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


def valid_tokens(tokens: QuerySet[ApiToken]) -> QuerySet[ApiToken]:
    """Those that are neither revoked nor expired."""
    return tokens.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=clock.now()), revoked_at__isnull=True)


def visible_tokens(user: User, team_id: int | None = None) -> QuerySet[ApiToken]:
    """The user's valid tokens, and all of the teams that they own; newest first, service tokens last."""
    teams = [m.team_id for m in memberships(user) if may(user, Action.MANAGE_TOKENS, m.team_id)]
    own = Q(user_id=user.pk, team_id__in=memberships(user).values("team_id"))
    result = valid_tokens(ApiToken.objects.select_related("user", "team").filter(own | Q(team_id__in=teams)))
    return (result if team_id is None else result.filter(team_id=team_id)).order_by("user__service_of", "-id")


@transaction.atomic
def revoke_token(actor: User, token_id: int) -> ApiToken:
    """Revoke a token; a service's account is deleted with it.

    Raises:
        ApiToken.DoesNotExist: no such token, or it is neither the actor's nor of a team that they own.
        PermissionDenied: the request's token has less scope.
    """
    token = visible_tokens(actor).select_for_update(of=("self",)).get(pk=token_id)
    if token.pk != actor.bound_token_id:  # any token may revoke itself
        require_scope(actor, Scope.ADMIN)
    token.revoked_at = clock.now()
    token.save(update_fields=["revoked_at"])
    if token.user.service_of_id is not None:
        Membership.objects.filter(user=token.user).delete()
        User.objects.filter(pk=token.user_id).update(is_active=False)
    audit.record(token.team_id, actor, "token.revoke", token.name, of=token.user.username)
    return token


@transaction.atomic
def revoke_named(user: User, name: str) -> None:
    """Revoke a person's tokens of this name before `oppo up` creates the next one."""
    for token in valid_tokens(ApiToken.objects.select_for_update().filter(user=user, name=name)):
        ApiToken.objects.filter(pk=token.pk).update(revoked_at=clock.now())
        audit.record(token.team_id, audit.SHELL, "token.revoke", name, of=user.username)


def user_for_token(text: str) -> User | None:
    """The user of a token, restricted to its team and scope; None if it is invalid."""
    parsed = parse_token(text, "api")
    if parsed is None:
        return None
    known = ApiToken.objects.select_related("user").annotate(now=clock.now_in_query())
    token = known.filter(prefix=parsed[0], revoked_at__isnull=True).first()
    if token is None or not same_digest(token.digest, parsed[1]) or not token.user.is_active:
        return None
    now = token.now
    if token.expires_at is not None and token.expires_at <= now:
        return None
    # Precise to the minute, which saves a write per request.
    if token.last_used_at is None or now - token.last_used_at > timedelta(minutes=1):
        ApiToken.objects.filter(pk=token.pk).update(last_used_at=now)
    token.user.bound_team_id, token.user.bound_scope, token.user.bound_token_id = token.team_id, Scope(token.scope), token.pk
    return token.user
