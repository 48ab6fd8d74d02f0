"""Teams: members, projects, webhooks and audit log (docs/teams.md)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from ninja import Path, Query, Router, Schema, Status
from pydantic import ConfigDict, Field

from oppo_platform.accounts import audit
from oppo_platform.accounts.access import Action, demand, require_scope, roles, visible_teams
from oppo_platform.accounts.models import AuditEntry, Membership, Role, Scope, Team
from oppo_platform.accounts.services import AccountError
from oppo_platform.alerts import webhooks
from oppo_platform.alerts.models import Webhook
from oppo_platform.alerts.policy import Condition
from oppo_platform.api.lookups import LARGEST_ID, caller
from oppo_platform.api.openapi import problems
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import problem
from oppo_platform.cursors import read_cursor, write_cursor
from oppo_platform.projects import services as projects

router = Router()
TeamId = Annotated[int, Path(description="The team's number.")]
WebhookId = Annotated[int, Path(description="The webhook's number.")]
POSTED = "Which alerts are posted to it (docs/alerts.md)."


class TeamItem(Schema):
    """A team of yours, with the role of this request."""

    id: int
    name: str
    role: Role
    projects: list[str]


class Teams(Schema):
    """By name; `next` is the `cursor` of the following page."""

    items: list[TeamItem]
    next: str | None


class MemberItem(Schema):
    """A member of a team."""

    user: str
    role: Role


class Members(Schema):
    """By name; `next` is the `cursor` of the following page."""

    items: list[MemberItem]
    next: str | None


class OneTeam(TeamItem):
    """A team with its members, at most 200 of them: `GET teams/{id}/members` has all."""

    members: list[MemberItem]


class ProjectBody(Schema):
    """A project to create."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=120, description="The project's name.")


class ProjectItem(Schema):
    """A project."""

    id: int
    name: str
    team: str


class WebhookItem(Schema):
    """A team's webhook. Only the host of its URL is shown: the rest may be a secret."""

    id: int
    host: str
    format: Webhook.Format
    conditions: list[Condition]
    on: bool
    created_at: datetime
    created_by: str | None


class Webhooks(Schema):
    """Oldest first; `next` is the `cursor` of the following page."""

    items: list[WebhookItem]
    next: str | None


class WebhookBody(Schema):
    """An https URL, and the conditions to post."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(max_length=2000, description="An https address.")
    format: Webhook.Format | None = Field(None, description="Format of the messages; null: by the address (docs/alerts.md).")
    conditions: list[Condition] = Field(description=POSTED)


class ChangedWebhook(Schema):
    """Enable or disable it, and its conditions."""

    model_config = ConfigDict(extra="forbid")

    on: bool = Field(description="Whether anything is posted to it.")
    conditions: list[Condition] = Field(description=POSTED)


class NewWebhook(WebhookItem):
    """A new webhook; its posts are signed with `secret`, which is shown this once."""

    secret: str


class AuditItem(Schema):
    """An action."""

    id: int
    at: datetime
    actor: str
    action: str
    target: str
    details: dict[str, Any]
    address: str | None


class AuditLog(Schema):
    """One page, newest first; `next` is the `cursor` of the following one."""

    items: list[AuditItem]
    next: str | None


@router.get("teams", summary="Your teams")
def list_teams(request: HttpRequest, limit: Limit = MOST, cursor: Cursor = "") -> Teams:
    """With their projects, and your role in each."""
    user = caller(request)
    teams, role_of = list(visible_teams(user).prefetch_related("projects")), roles(user)
    return Teams(**paged(teams, limit, cursor, lambda team: TeamItem(**_team(team, role_of[team.pk]))))


@router.get("teams/{int:team_id}", summary="A team and its members")
def show_team(request: HttpRequest, team_id: TeamId) -> OneTeam:
    """Members by name."""
    team = _mine(request, team_id)
    return OneTeam(**_team(team, roles(caller(request))[team.pk]), members=[_member(each) for each in _people(team)[:MOST]])


@router.get("teams/{int:team_id}/members", summary="Members of a team")
def list_members(request: HttpRequest, team_id: TeamId, limit: Limit = MOST, cursor: Cursor = "") -> Members:
    """By name, with the role of each; service accounts are not members."""
    return Members(**paged(list(_people(_mine(request, team_id))), limit, cursor, _member))


@router.post("teams/{int:team_id}/projects", summary="Create a project", response={201: ProjectItem})
def create_project(request: HttpRequest, team_id: TeamId, body: ProjectBody) -> Any:
    """201; 403 for viewers, 422 for a name that is empty or taken."""
    team = _mine(request, team_id)
    try:
        project = projects.create_project(caller(request), team, body.name)
    except AccountError as refused:
        return problem(422, str(refused))
    return Status(201, ProjectItem(id=project.pk, name=project.name, team=team.name))


@router.get("teams/{int:team_id}/audit", summary="A team's audit log", openapi_extra=problems(403))
def list_audit_entries(
    request: HttpRequest,
    team_id: TeamId,
    actor: Annotated[str, Query(description="Only actions of this actor, as `user:ada`.")] = "",
    action: Annotated[str, Query(description="Only this action, as `run.submit`; docs/teams.md lists them.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> AuditLog:
    """Newest first, optionally of one actor or action. Owners only."""
    team, user = _mine(request, team_id), caller(request)
    demand(user, Action.SEE_AUDIT_LOG, team.pk)
    before = read_cursor(cursor, int)[0] if cursor else None
    page = audit.audit_page(team.pk, actor, action, before, limit)
    return AuditLog(items=[_entry(entry) for entry in page.entries], next=write_cursor(page.older) if page.older else None)


@router.get("teams/{int:team_id}/webhooks", summary="A team's webhooks", openapi_extra=problems(403))
def list_webhooks(request: HttpRequest, team_id: TeamId, limit: Limit = MOST, cursor: Cursor = "") -> Webhooks:
    """Owners only."""
    team = _mine(request, team_id)
    demand(caller(request), Action.MANAGE_ALERTS, team.pk)
    return Webhooks(**paged(list(webhooks.team_webhooks(team)), limit, cursor, _hook))


@router.post("teams/{int:team_id}/webhooks", summary="Create a webhook", response={201: NewWebhook})
def add_webhook(request: HttpRequest, response: HttpResponse, team_id: TeamId, body: WebhookBody) -> Any:
    """201 with its secret, shown this once. Owners only; 422 for an invalid URL."""
    response.headers["Cache-Control"] = "no-store"  # nor is it stored for repeated requests
    team, user = _owned(request, team_id)
    try:
        secret = webhooks.add_webhook(user, team, body.url, body.conditions, body.format or "")
    except AccountError as refused:
        return problem(422, str(refused))
    hook = webhooks.team_webhooks(team).latest("id")
    return Status(201, NewWebhook(**_hook(hook).model_dump(), secret=secret))


@router.post("teams/{int:team_id}/webhooks/{int:webhook_id}", summary="Enable, disable or change a webhook")
def change_webhook(request: HttpRequest, team_id: TeamId, webhook_id: WebhookId, body: ChangedWebhook) -> WebhookItem:
    """Owners only. Pending deliveries of a disabled one are not sent."""
    team, user = _owned(request, team_id)
    return _hook(webhooks.change_webhook(user, team, min(webhook_id, LARGEST_ID), on=body.on, conditions=body.conditions))


@router.delete("teams/{int:team_id}/webhooks/{int:webhook_id}", summary="Delete a webhook", response={204: None})
def delete_webhook(request: HttpRequest, team_id: TeamId, webhook_id: WebhookId) -> Status:
    """Owners only. Pending deliveries are not sent. `…/restore` restores it, for a day; then it is deleted permanently."""
    team, user = _owned(request, team_id)
    webhooks.delete_webhook(user, team, min(webhook_id, LARGEST_ID))
    return Status(204, None)


@router.post("teams/{int:team_id}/webhooks/{int:webhook_id}/restore", summary="Restore a deleted webhook")
def restore_webhook(request: HttpRequest, team_id: TeamId, webhook_id: WebhookId) -> WebhookItem | Any:
    """Owners only. Without effect if it is not deleted; 422 if the team has too many webhooks by now."""
    team, user = _owned(request, team_id)
    try:
        return _hook(webhooks.restore_webhook(user, team, min(webhook_id, LARGEST_ID)))
    except AccountError as refused:
        return problem(422, str(refused))


def _mine(request: HttpRequest, team_id: int) -> Team:
    return visible_teams(caller(request)).get(pk=min(team_id, LARGEST_ID))


def _people(team: Team) -> QuerySet[Membership]:
    return team.memberships.filter(user__service_of=None).select_related("user").order_by("user__username")


def _member(membership: Membership) -> MemberItem:
    return MemberItem(user=membership.user.username, role=Role(membership.role))


def _owned(request: HttpRequest, team_id: int) -> tuple[Team, Any]:
    team, user = _mine(request, team_id), caller(request)
    require_scope(user, Scope.ADMIN)
    return team, user


def _team(team: Team, role: str) -> dict[str, Any]:
    projects = sorted(project.name for project in team.projects.all())
    return {"id": team.pk, "name": team.name, "role": role, "projects": projects}


def _hook(hook: Webhook) -> WebhookItem:
    by = hook.created_by.username if hook.created_by else None
    conditions = [Condition(word) for word in hook.conditions]
    return WebhookItem(
        id=hook.pk,
        host=webhooks.webhook_host(hook),
        format=Webhook.Format(hook.format),
        conditions=conditions,
        on=hook.on,
        created_at=hook.created_at,
        created_by=by,
    )


def _entry(entry: AuditEntry) -> AuditItem:
    fields = ("id", "at", "actor", "action", "target", "details", "address")
    return AuditItem(**{name: getattr(entry, name) for name in fields})
