"""allauth's hooks: signup by invite only, and audit entries of account changes."""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.db import transaction
from django.http import HttpRequest

from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.accounts.passwords import end_open_links


class ClosedSignup(DefaultAccountAdapter):
    """No public signup."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Always false."""
        return False

    def set_password(self, user: User, password: str) -> None:
        """Change the password, from its page or with a mailed link, and end the person's open links."""
        with transaction.atomic():
            super().set_password(user, password)
            end_open_links(user)
            audit.record_for_person(user, user, "password.change")

    def post_login(self, request: HttpRequest, user: User, **how: Any) -> Any:
        """After a login by password."""
        with transaction.atomic():
            audit.record_for_person(user, user, "login.password")
        return super().post_login(request, user, **how)
