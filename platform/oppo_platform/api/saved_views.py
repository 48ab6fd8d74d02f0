"""Saved views of the runs table over HTTP (docs/interfaces.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from django.http import Http404, HttpRequest
from ninja import Path, Router, Schema, Status
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from oppo_platform.accounts.access import visible_teams
from oppo_platform.api.lookups import LARGEST_ID, caller
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import problem
from oppo_platform.runs import saved_views as service
from oppo_platform.runs.models import SavedView

router = Router()
ViewId = Annotated[int, Path(description="The view's number.")]
NAME = "The view's name."
QUERY = "What the view shows, as in the table's address: `show`, `project`, `q`, `sort` and `cols`."


class ViewBody(Schema):
    """A view to save; `team` is an id; without one the view is private."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(description=NAME)
    query: dict[str, str] = Field(max_length=20, description=QUERY)
    team: int | None = Field(None, description="The number of the team that shares it; null: only you see it.")


class ChangeBody(Schema):
    """A new name, or a new content."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(None, description=NAME)
    query: dict[str, str] | None = Field(None, max_length=20, description=QUERY)


class DefaultBody(Schema):
    """The default view of the user's table of runs; null: all runs."""

    model_config = ConfigDict(extra="forbid")

    view: int | None = Field(description="The view's number; null: all runs.")


class Views(TypedDict):
    """Saved views by name, a page of them."""

    items: list[service.ViewItem]
    next: str | None


class DefaultView(TypedDict):
    """The default view; null: all runs."""

    view: int | None


class DeletedView(TypedDict):
    """The deleted view."""

    id: int


@router.get("views", summary="Saved views of the runs table")
def list_views(request: HttpRequest, limit: Limit = MOST, cursor: Cursor = "") -> Views:
    """Your own and your teams', by name."""
    return Views(**paged(service.menu_views(caller(request)), limit, cursor))


@router.post("views", summary="Save a view", response={201: Any})
def save_view(request: HttpRequest, body: ViewBody) -> service.ViewItem | Any:
    """201; 422 for a name that is taken or an invalid filter."""
    user = caller(request)
    team = None
    if body.team is not None:
        team = visible_teams(user).filter(pk=body.team).first() if 0 < body.team <= LARGEST_ID else None
        if team is None:
            raise Http404
    result = _as_result(lambda: service.save_view(user, body.name, body.query, team))
    return Status(201, result) if isinstance(result, dict) else result


@router.post("views/default", summary="Set your default view of the runs table")
def set_default_view(request: HttpRequest, body: DefaultBody) -> DefaultView:
    """`{"view": null}` for all runs."""
    service.set_default(caller(request), body.view if body.view is None else _id(body.view))
    return {"view": body.view}


@router.post("views/{int:view_id}", summary="Rename a view or replace its content")
def change_view(request: HttpRequest, view_id: ViewId, body: ChangeBody) -> service.ViewItem | Any:
    """Allowed for its owner, and the maintainers of its team."""
    return _as_result(lambda: service.change_view(caller(request), _id(view_id), body.name, body.query))


@router.post("views/{int:view_id}/delete", summary="Delete a view")
def delete_view(request: HttpRequest, view_id: ViewId) -> DeletedView:
    """`…/restore` restores it until its owner deletes another one."""
    service.delete_view(caller(request), _id(view_id))
    return {"id": view_id}


@router.post("views/{int:view_id}/restore", summary="Restore a deleted view")
def restore_view(request: HttpRequest, view_id: ViewId) -> service.ViewItem | Any:
    """422 if its name is taken meanwhile."""
    return _as_result(lambda: service.restore_view(caller(request), _id(view_id)))


def _id(view_id: int) -> int:
    """Raises `SavedView.DoesNotExist` for an invalid id."""
    if not 0 < view_id <= LARGEST_ID:
        raise SavedView.DoesNotExist
    return view_id


def _as_result(deed: Callable[[], service.ViewItem]) -> Any:
    try:
        return deed()
    except service.ViewRefused as refused:
        return problem(422, str(refused))
