"""API tokens, and the caller's identity (docs/tokens.md)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Path, Query, Router, Schema, Status
from pydantic import ConfigDict, Field

from oppo_platform.accounts import api_tokens as service
from oppo_platform.accounts.access import roles, visible_teams
from oppo_platform.accounts.models import ApiToken, Scope
from oppo_platform.accounts.services import AccountError
from oppo_platform.api.lookups import LARGEST_ID, caller
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import problem

router = Router()
TokenId = Annotated[int, Path(description="The token's number.")]


class TokenItem(Schema):
    """A token without its text."""

    id: int
    name: str
    scope: Scope
    team: str
    team_id: int
    user: str
    service: bool
    prefix: str
    created_at: datetime
    expires_at: datetime | None
    last_used_at: datetime | None


class Tokens(Schema):
    """One page; `next` is the `cursor` of the following one."""

    items: list[TokenItem]
    next: str | None


class NewTokenItem(TokenItem):
    """A new token: `token` is shown this once."""

    token: str


class TokenBody(Schema):
    """A token to create; `days` null: it never expires."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=60, description="The token's name.")
    team: int | None = Field(None, description="The number of the team whose runs it is for; null: the first of your teams.")
    scope: Scope = Field(Scope.SUBMIT, description="What it may do (docs/tokens.md).")
    days: float | None = Field(90, gt=0, le=service.LONGEST_DAYS, description="Days until it expires; null: never.")
    service: bool = Field(False, description="Whether it belongs to the team instead of to you.")


class Me(Schema):
    """The caller: teams with the role of this request, and the token, unless a session is used."""

    user: str
    email: str
    service: bool
    teams: list[dict[str, Any]]
    token: TokenItem | None


@router.get("me", summary="Your user, teams and permissions")
def who_am_i(request: HttpRequest) -> Me:
    """Your teams with your role in each, limited by the token's scope."""
    user = caller(request)
    used = ApiToken.objects.select_related("user", "team").filter(pk=user.bound_token_id).first()
    role_of = roles(user)
    teams = [{"id": team.pk, "name": team.name, "role": role_of[team.pk]} for team in visible_teams(user)]
    is_service = user.service_of_id is not None
    email = "" if is_service else user.email
    return Me(user=user.username, email=email, service=is_service, teams=teams, token=_item(used) if used else None)


@router.get("tokens", summary="API tokens")
def list_tokens(
    request: HttpRequest,
    team: Annotated[int | None, Query(description="Only this team's, by number.")] = None,
    limit: Limit = MOST,
    cursor: Cursor = "",
) -> Tokens:
    """Yours, and all of the teams that you own; newest first, service tokens last."""
    user = caller(request)
    if team is not None:
        visible_teams(user).get(pk=min(team, LARGEST_ID))
    return Tokens(**paged(list(service.visible_tokens(user, team)), limit, cursor, _item))


@router.post("tokens", summary="Create an API token", response={201: NewTokenItem})
def create_token(request: HttpRequest, response: HttpResponse, body: TokenBody) -> Any:
    """201 with the token, shown this once; 422 for an invalid name, scope or validity; 403 if your token has a lesser scope."""
    response.headers["Cache-Control"] = "no-store"  # nor is it stored for repeated requests
    user = caller(request)
    teams = visible_teams(user)
    team = teams.get(pk=min(body.team, LARGEST_ID)) if body.team is not None else teams.first()
    if team is None:
        return problem(422, "You are not in a team, and a token belongs to a team.")
    make = service.create_service_token if body.service else service.create_own_token
    try:
        made = make(user, team, body.name, body.days, body.scope)
    except AccountError as refused:
        return problem(422, str(refused))
    return Status(201, NewTokenItem(**_item(made.token).model_dump(), token=made.text))


@router.delete("tokens/{int:token_id}", summary="Revoke an API token", response={204: None})
def revoke_token(request: HttpRequest, token_id: TokenId) -> Status:
    """It is invalid from the next request on. 404 if it does not exist, or is neither yours nor of a team that you own."""
    if token_id > LARGEST_ID:
        raise ApiToken.DoesNotExist
    service.revoke_token(caller(request), token_id)
    return Status(204, None)


def _item(token: ApiToken) -> TokenItem:
    return TokenItem(
        id=token.pk,
        name=token.name,
        scope=Scope(token.scope),
        team=token.team.name,
        team_id=token.team_id,
        user=token.user.username,
        service=token.user.service_of_id is not None,
        prefix=token.prefix,
        created_at=token.created_at,
        expires_at=token.expires_at,
        last_used_at=token.last_used_at,
    )
