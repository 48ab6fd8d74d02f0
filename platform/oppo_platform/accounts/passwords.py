"""Password links: an owner or administrator gives a person a link with which they set a new password, once."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.core.exceptions import PermissionDenied
from django.db import transaction

from oppo_platform import clock
from oppo_platform.accounts import audit, one_time_links
from oppo_platform.accounts.access import may_reset_password
from oppo_platform.accounts.models import LoginLink, PasswordLink, User
from oppo_platform.accounts.services import AccountError, check_password
from oppo_platform.tokens import new_token

PASSWORD_LINK_HOURS = 24
VOID = "This link has been used, was revoked or has expired. Ask for a new one."


@transaction.atomic
def create_password_link(actor: User | None, user: User) -> str:
    """A URL with which the person sets a new password within a day; revokes earlier ones.

    Args:
        actor: its creator; None for an administrator on the server.

    Raises:
        PermissionDenied: the actor does not own every team of the person.
    """
    if actor is not None and not may_reset_password(actor, user):
        raise PermissionDenied(
            f"{user.username} is in a team that you do not own, and the link would let you in there. "
            "An administrator prints one on the server: oppo admin password-link."
        )
    User.objects.select_for_update().get(pk=user.pk)  # of two creators, the second revokes the first one's link
    one_time_links.revoke(PasswordLink.objects.filter(user=user))
    token, now = new_token("password"), clock.now()
    PasswordLink.objects.create(
        user=user,
        prefix=token.prefix,
        digest=token.digest,
        created_by=actor,
        created_at=now,
        expires_at=now + timedelta(hours=PASSWORD_LINK_HOURS),
    )
    audit.record_for_person(user, actor or audit.SHELL, "password.link")
    return f"{settings.OPPO_BASE_URL}/password-links/{token.text}"


@transaction.atomic
def revoke_password_links(actor: User, user: User) -> None:
    """Revoke the person's open links. Raises `PermissionDenied` as `create_password_link`; `PasswordLink.DoesNotExist` without
    any."""
    if not may_reset_password(actor, user):
        raise PermissionDenied(f"{user.username} is in a team that you do not own.")
    if not one_time_links.revoke(PasswordLink.objects.filter(user=user)):
        raise PasswordLink.DoesNotExist
    audit.record_for_person(user, actor, "password.link_revoke")


def end_open_links(user: User) -> None:
    """Make the person's password and login links invalid, as every change of the password does."""
    one_time_links.revoke(PasswordLink.objects.filter(user=user))
    one_time_links.usable(LoginLink.objects.filter(user=user)).update(expires_at=clock.now())


def find_password_link(text: str, *, lock: bool = False) -> PasswordLink | None:
    """The row of a link, if it is valid and its creator may still reset this person's password.

    Args:
        lock: locks the link and the person, so that neither a link nor a membership is created until the transaction ends.
    """
    links = PasswordLink.objects.select_related("user", "created_by").filter(user__is_active=True)
    link = one_time_links.find_link(links.select_for_update(of=("self", "user")) if lock else links, text, "password")
    if link is None or link.created_by is None:
        return link
    return link if link.created_by.is_active and may_reset_password(link.created_by, link.user) else None


@transaction.atomic
def set_password_by_link(text: str, password: str) -> User:
    """Set the password and end all sessions of the person. Raises `AccountError` if the link is invalid or the password weak."""
    link = find_password_link(text, lock=True)
    if link is None:
        raise AccountError(VOID)
    check_password(link.user, password)
    if not one_time_links.use_link(link):
        raise AccountError(VOID)
    link.user.set_password(password)
    link.user.save(update_fields=["password"])
    end_open_links(link.user)
    audit.record_for_person(link.user, link.user, "password.reset")
    return link.user
