"""The view of one-time login links. All other login pages are allauth's."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth import login
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from oppo_platform.accounts.services import use_login_link


@login_not_required
@never_cache
@require_GET
def login_link(request: HttpRequest, token: str) -> HttpResponse:
    """Log in and redirect to the front page; an invalid link leads to the login page with a message."""
    user = use_login_link(token)
    if user is None:
        messages.error(
            request, "This login link has been used or has expired. Log in, or create a new link with oppo login-link."
        )
        return redirect("account_login")
    login(request, user, backend="allauth.account.auth_backends.AuthenticationBackend")
    return redirect("/")
