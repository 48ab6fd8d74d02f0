"""Changes of a team's members and roles. Permissions are in `accounts.access`.

Guarantee: a team never loses its last owner. Every change of members locks the team's row, and roles are read under that lock.
"""

from __future__ import annotations

from datetime import datetime

from django.db import transaction

from oppo_platform import clock
from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand
from oppo_platform.accounts.models import ApiToken, AuditEntry, Membership, Role, Team, User
from oppo_platform.accounts.services import AccountError, find_user


@transaction.atomic
def set_member(actor: User, team: Team, who: str, role: str) -> Membership:
    """Add an existing user to the team, or change a member's role.

    Args:
        who: user name or email.
        role: one of `Role`.

    Raises:
        PermissionDenied: the actor is no owner. AccountError: no such user or role, or the team would have no owner.
    """
    lock_team(team)
    demand(actor, Action.MANAGE_MEMBERS, team.pk)
    if role not in Role.values:
        raise AccountError(f"{role} is not a role; roles are {', '.join(Role.values)}.")
    user = find_user(who.strip())
    was = Membership.objects.filter(team=team, user=user).first()
    if was is None:
        return _join(actor, team, user, role)
    if was.role != role:
        _keep_an_owner(team, was, f"{user.username} is the last owner of {team.name}. Make another member an owner first.")
        audit.record(team.pk, actor, "member.role", audit.actor_name(user), old=was.role, new=role)
        was.role = role
        was.save(update_fields=["role"])
    return was


def _join(actor: User, team: Team, user: User, role: str) -> Membership:
    audit.record(team.pk, actor, "member.add", audit.actor_name(user), role=role)
    return Membership.objects.create(team=team, user=user, role=role)


@transaction.atomic
def remove_member(actor: User, team: Team, user_id: int) -> User:
    """Remove a member from the team; their runs stay, their API tokens for the team are revoked.

    Raises:
        PermissionDenied: the actor is no owner. Membership.DoesNotExist: there is no such member. AccountError: the
        last owner.
    """
    lock_team(team)
    demand(actor, Action.MANAGE_MEMBERS, team.pk)
    member = Membership.objects.select_related("user").get(team=team, user_id=user_id, user__service_of__isnull=True)
    _keep_an_owner(team, member, f"{member.user.username} is the last owner of {team.name}.")
    _part(team, member)
    joined = member.joined_at.isoformat()
    audit.record(team.pk, actor, "member.remove", audit.actor_name(member.user), role=member.role, joined_at=joined)
    return member.user


@transaction.atomic
def restore_member(actor: User, team: Team, user_id: int) -> Membership:
    """Undo `remove_member`, with the role and the time of joining from the audit log. Revoked tokens stay revoked.

    Raises:
        PermissionDenied: the actor is no owner. User.DoesNotExist: nobody with this id was removed from the team. AccountError:
            the person is a member again.
    """
    lock_team(team)
    demand(actor, Action.MANAGE_MEMBERS, team.pk)
    user = User.objects.get(pk=user_id, service_of__isnull=True)
    removals = AuditEntry.objects.filter(team=team, action="member.remove", target=audit.actor_name(user))
    if (removal := removals.order_by("-id").first()) is None:
        raise User.DoesNotExist
    if Membership.objects.filter(team=team, user=user).exists():
        raise AccountError(f"{user.username} is a member of {team.name} already.")
    role, joined = removal.details["role"], removal.details.get("joined_at")
    audit.record(team.pk, actor, "member.restore", audit.actor_name(user), role=role)
    at = datetime.fromisoformat(joined) if joined else clock.now()
    return Membership.objects.create(team=team, user=user, role=role, joined_at=at)


@transaction.atomic
def leave_team(actor: User, team: Team) -> None:
    """Leave. Raises `AccountError` for the last owner, `Membership.DoesNotExist` for non-members."""
    lock_team(team)
    member = Membership.objects.select_related("user").get(team=team, user=actor)
    _keep_an_owner(team, member, f"You are the last owner of {team.name}. Make another member an owner first.")
    audit.record(team.pk, actor, "member.leave", audit.actor_name(actor), role=member.role)
    _part(team, member)


def lock_team(team: Team) -> None:
    """Wait for other changes of the team's members or webhooks, until the end of the transaction."""
    # Not the key: rows that refer to the team may be added meanwhile.
    Team.objects.select_for_update(no_key=True).get(pk=team.pk)


def _keep_an_owner(team: Team, member: Membership, otherwise: str) -> None:
    """Raise `AccountError` if this member is the only owner. The team is locked."""
    others = Membership.objects.filter(team=team, role=Role.OWNER).exclude(pk=member.pk)
    if member.role == Role.OWNER and not others.exists():
        raise AccountError(otherwise)


def _part(team: Team, member: Membership) -> None:
    # Revoked explicitly, so that old tokens stay invalid if the person is added again.
    ApiToken.objects.filter(team=team, user_id=member.user_id, revoked_at__isnull=True).update(revoked_at=clock.now())
    member.delete()
