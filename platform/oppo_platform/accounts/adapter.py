"""allauth's hooks: signup is by invite only, and what happens to an account leaves a row in the audit log."""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from django.db import transaction
from django.http import HttpRequest

from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User


class ClosedSignup(DefaultAccountAdapter):
    """Nobody signs up by themselves."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Never."""
        return False

    def set_password(self, user: User, password: str) -> None:
        """Change the password, on the page for it or with a mailed link."""
        with transaction.atomic():
            super().set_password(user, password)
            audit.record_for_person(user, user, "password.change")

    def post_login(self, request: HttpRequest, user: User, **how: Any) -> Any:
        """After a login by password."""
        with transaction.atomic():
            audit.record_for_person(user, user, "login.password")
        return super().post_login(request, user, **how)
