"""allauth's switch for open signup: closed. People get in by an administrator's hand."""

from __future__ import annotations

from allauth.account.adapter import DefaultAccountAdapter
from django.http import HttpRequest


class ClosedSignup(DefaultAccountAdapter):
    """Nobody signs up by themselves."""

    def is_open_for_signup(self, request: HttpRequest) -> bool:
        """Never."""
        return False
