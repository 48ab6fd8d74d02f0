"""Invites: links with which one person joins a team, with an existing or a new account.

An invite is valid only while its creator may still invite, so that a former owner leaves no way in.
"""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet

from oppo_platform import clock
from oppo_platform.accounts import audit, one_time_links
from oppo_platform.accounts.access import Action, demand, granting_roles
from oppo_platform.accounts.models import Invite, Membership, Role, Team, User
from oppo_platform.accounts.services import AccountError, register
from oppo_platform.tokens import new_token

INVITE_DAYS = 7
VOID = "This invite has been used, was revoked or has expired. Ask for a new one."


def open_invites(team: Team) -> QuerySet[Invite]:
    """Invites that can still be used, newest first."""
    return one_time_links.usable(_counting(Invite.objects.filter(team=team))).select_related("created_by").order_by("-id")


def _counting(invites: QuerySet[Invite]) -> QuerySet[Invite]:
    may = Membership.objects.filter(
        team=OuterRef("team"), user=OuterRef("created_by"), role__in=granting_roles(Action.MANAGE_MEMBERS), user__is_active=True
    )
    return invites.filter(Exists(may))


@transaction.atomic
def create_invite(actor: User, team: Team, role: str, note: str = "") -> str:
    """A URL with which one person joins as `role` within a week; shown once.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: there is no such role.
    """
    demand(actor, Action.MANAGE_MEMBERS, team.pk)
    if role not in Role.values:
        raise AccountError(f"{role} is not a role; roles are {', '.join(Role.values)}.")
    token, now, note = new_token("invite"), clock.now(), note.strip()[:254]
    Invite.objects.create(
        team=team,
        role=role,
        note=note,
        prefix=token.prefix,
        digest=token.digest,
        created_by=actor,
        created_at=now,
        expires_at=now + timedelta(days=INVITE_DAYS),
    )
    audit.record(team.pk, actor, "invite.create", note or token.prefix, role=role)
    return f"{settings.OPPO_BASE_URL}/invites/{token.text}"


@transaction.atomic
def revoke_invite(actor: User, team: Team, invite_id: int) -> None:
    """Revoke it. Raises `PermissionDenied` for non-owners, `Invite.DoesNotExist` if it is not valid anyway."""
    demand(actor, Action.MANAGE_MEMBERS, team.pk)
    mine = Invite.objects.filter(team=team, pk=invite_id)
    if not one_time_links.revoke(mine):
        raise Invite.DoesNotExist
    invite = mine.get()
    audit.record(team.pk, actor, "invite.revoke", invite.note or invite.prefix, role=invite.role)


def find_invite(text: str) -> Invite | None:
    """The invite behind a link, if it can be used."""
    return one_time_links.find_link(_counting(Invite.objects.select_related("team", "created_by")), text, "invite")


@transaction.atomic
def join_by_invite(text: str, user: User) -> Membership:
    """Join with an existing account. Raises `AccountError` if the link is invalid or the user is in the team already."""
    invite = find_invite(text)
    if invite is None:
        raise AccountError(VOID)
    Team.objects.select_for_update(no_key=True).get(pk=invite.team_id)
    if Membership.objects.filter(team_id=invite.team_id, user=user).exists():
        raise AccountError(f"You are already in {invite.team.name}; the invite can still be used by someone else.")
    if not one_time_links.use_link(invite):
        raise AccountError(VOID)
    audit.record(
        invite.team_id, user, "invite.accept", invite.note or invite.prefix, role=invite.role, by=invite.created_by.username
    )
    return Membership.objects.create(team_id=invite.team_id, user=user, role=invite.role)


@transaction.atomic
def register_by_invite(text: str, username: str, email: str, password: str) -> User:
    """Create an account and join. Raises `AccountError` if the link, name, address or password is invalid."""
    if find_invite(text) is None:
        raise AccountError(VOID)
    user = register(username, email, password)
    join_by_invite(text, user)
    return user
