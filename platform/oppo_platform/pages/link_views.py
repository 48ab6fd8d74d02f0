"""Invites and password links: created by an owner, used by the person with the link.

A link is shown once, in the response to the POST that created it: only its digest is stored.
"""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth import login
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from oppo_platform.accounts import invites, passwords
from oppo_platform.accounts.mail import send_link
from oppo_platform.accounts.models import Invite, PasswordLink, Team, User
from oppo_platform.accounts.services import AccountError
from oppo_platform.pages.team_layout import get_team, reply_with_message
from oppo_platform.pages.team_views import show_team

BACKEND = "allauth.account.auth_backends.AuthenticationBackend"


@never_cache
@require_POST
def create_invite(request: HttpRequest, team_id: int) -> HttpResponse:
    """Create an invite, and show its link once."""
    team = get_team(request, team_id)
    role, note = request.POST.get("role", ""), request.POST.get("note", "").strip()
    try:
        link = invites.create_invite(request.user, team, role, note)
    except AccountError as refused:
        messages.error(request, str(refused))
        return show_team(request, team, status=422, new_invite={"role": role, "note": note})
    message = (
        f"{request.user.username} invites you to the team {team.name}. The link works once, within {invites.INVITE_DAYS} days:"
    )
    sent = send_link(note, f"Join {team.name} on OPPO Platform", f"{message}\n\n{link}\n")
    words = f"The first person to open the link joins {team.name} as {role}. Valid for {invites.INVITE_DAYS} days."
    return show_team(request, team, fresh_title="Invite link", fresh_link=link, fresh_words=words, sent_to=note if sent else "")


@require_POST
def revoke_invite(request: HttpRequest, team_id: int, invite_id: int) -> HttpResponse:
    """Revoke an invite."""
    team = get_team(request, team_id)
    try:
        invites.revoke_invite(request.user, team, invite_id)
    except Invite.DoesNotExist:
        raise Http404 from None
    return reply_with_message(request, lambda: "Invite revoked.", "team", team_id)


@never_cache
@require_POST
def create_password_link(request: HttpRequest, team_id: int, user_id: int) -> HttpResponse:
    """Create a link with which a member sets a new password, and show it once."""
    team = get_team(request, team_id)
    user = _member(team, user_id)
    link = passwords.create_password_link(request.user, user)
    message = f"Set a new password for {user.username}. The link works once, within {passwords.PASSWORD_LINK_HOURS} hours:"
    sent = send_link(user.email, "Set a new password for OPPO Platform", f"{message}\n\n{link}\n")
    words = (
        f"The link sets a new password and is valid for {passwords.PASSWORD_LINK_HOURS} hours. The old password works until then."
    )
    title = f"Password link for {user.username}"
    return show_team(request, team, fresh_title=title, fresh_link=link, fresh_words=words, sent_to=user.email if sent else "")


@require_POST
def revoke_password_link(request: HttpRequest, team_id: int, user_id: int) -> HttpResponse:
    """Revoke a member's open password link."""
    user = _member(get_team(request, team_id), user_id)
    try:
        passwords.revoke_password_links(request.user, user)
    except PasswordLink.DoesNotExist:
        raise Http404 from None
    return reply_with_message(request, lambda: f"{user.username}'s password link was revoked.", "team", team_id)


def _member(team: Team, user_id: int) -> User:
    member: User = get_object_or_404(User, pk=user_id, memberships__team=team)
    return member


@login_not_required
@never_cache
@require_http_methods(["GET", "POST"])
def invite(request: HttpRequest, token: str) -> HttpResponse:
    """Join a team: with one click if logged in, otherwise with a new account."""
    result = invites.find_invite(token)
    if result is None:
        return render(request, "links/void.html", {"why": invites.VOID}, status=404)
    known = request.user.is_authenticated
    error, given = "", {"username": "", "email": result.note if "@" in result.note else ""}
    if request.method == "POST":
        given = {name: request.POST.get(name, "") for name in given}
        try:
            if known:
                invites.join_by_invite(token, request.user)
            else:
                login(request, invites.register_by_invite(token, **given, password=request.POST.get("password", "")), BACKEND)
            messages.success(request, f"Welcome to {result.team.name}. Your role: {result.role}.")
            return redirect("pages:team", result.team_id)
        except AccountError as refused:
            error = str(refused)
    context = {"invite": result, "known": known, "error": error, "given": given}
    return render(request, "links/invite.html", context, status=422 if error else 200)


@login_not_required
@never_cache
@require_http_methods(["GET", "POST"])
def password_link(request: HttpRequest, token: str) -> HttpResponse:
    """Set a new password, and log in."""
    result = passwords.find_password_link(token)
    if result is None:
        return render(request, "links/void.html", {"why": passwords.VOID}, status=404)
    error = ""
    if request.method == "POST":
        password = request.POST.get("password", "")
        try:
            if password != request.POST.get("again", ""):
                raise AccountError("The passwords do not match.")
            login(request, passwords.set_password_by_link(token, password), BACKEND)
            messages.success(request, "Your password was changed. All your other sessions are signed out.")
            return redirect("pages:runs")
        except AccountError as refused:
            error = str(refused)
    return render(request, "links/password.html", {"link": result, "error": error}, status=422 if error else 200)
