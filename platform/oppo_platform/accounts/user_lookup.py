"""Accounts and their passwords, as people set them themselves."""

from __future__ import annotations

from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import IntegrityError
from django.db.models import Q

from oppo_platform.accounts.models import User
from oppo_platform.accounts.services import AccountError

TAKEN = "There is an account with this user name or email address. If it is yours, log in and open the link again."


def register(username: str, email: str, password: str) -> User:
    """A new account. Raises `AccountError` for a name or an address that is malformed or taken, or a weak password."""
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
    except IntegrityError:  # somebody else took the name a moment ago
        raise AccountError(TAKEN) from None
    return user


def check_password(user: User, password: str) -> None:
    """Raise `AccountError` when the password is too weak for this person."""
    try:
        validate_password(password, user)
    except ValidationError as error:
        raise AccountError(" ".join(error.messages)) from None
