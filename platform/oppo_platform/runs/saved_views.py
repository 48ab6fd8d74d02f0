"""Saved views of the runs table: create, rename, replace, delete, restore, and set as a user's default.

A private view is visible to its owner only. A team's view is visible to its members; its owner and maintainers edit it.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from typing_extensions import TypedDict

from oppo_platform import clock
from oppo_platform.accounts.access import Action, demand, granting_roles, memberships
from oppo_platform.accounts.models import Team, User
from oppo_platform.projects.access import visible_projects
from oppo_platform.runs.columns import parse_columns
from oppo_platform.runs.filtering import FilterError, apply_filter, sort_expression
from oppo_platform.runs.models import DefaultView, Run, SavedView

KEPT = ("show", "project", "q", "sort", "cols")
SHOWN = ("active", "waiting", "failed", "ended")
LONGEST_NAME, MOST_VIEWS = 60, 200


class ViewRefused(ValueError):
    """A view cannot be saved; the message says why."""


class ViewItem(TypedDict):
    """A view in the menu and the API. `team` is empty for a private one."""

    id: int
    name: str
    team: str
    owner: str
    query: dict[str, str]
    default: bool
    may_change: bool


def visible_views(user: User) -> QuerySet[SavedView]:
    """The user's own private ones and those of their teams, by name."""
    return _accessible(user).filter(deleted_at=None).select_related("team", "owner").order_by("name", "id")


def _accessible(user: User) -> QuerySet[SavedView]:
    teams = memberships(user).values("team_id")
    return SavedView.objects.filter(Q(owner_id=user.pk, team=None) | Q(team_id__in=teams))


def menu_views(user: User) -> list[ViewItem]:
    """Views in the user's menu."""
    return _items(user, visible_views(user)[:MOST_VIEWS])


def view_query(view: SavedView) -> dict[str, str]:
    """The view's query parameters in a fixed order, which the database does not keep."""
    return {name: view.query[name] for name in KEPT if name in view.query}


def default_view(user: User) -> SavedView | None:
    """The default view of the user's table, if they chose one and may still see it."""
    return visible_views(user).filter(pk__in=DefaultView.objects.filter(user_id=user.pk).values("view_id")).first()


def save_view(user: User, name: str, query: dict[str, str], team: Team | None) -> ViewItem:
    """Save a view, for a team if given.

    Raises:
        ViewRefused: the name or the query is not valid, or there are too many. PermissionDenied: a viewer saves for a team.
    """
    if team is not None:
        demand(user, Action.SUBMIT, team.pk)
    if visible_views(user).count() >= MOST_VIEWS:
        raise ViewRefused(f"There are already {MOST_VIEWS} views. Delete one first.")
    view = SavedView(owner_id=user.pk, team=team, name=_name(name), query=_query(user, query), created_at=clock.now())
    _write(view)
    return _items(user, [view])[0]


def change_view(user: User, view_id: int, name: str | None = None, query: dict[str, str] | None = None) -> ViewItem:
    """Rename a view, or replace its query.

    Raises:
        SavedView.DoesNotExist, PermissionDenied, ViewRefused.
    """
    with transaction.atomic():
        view = _changeable(user, view_id)
        view.name = view.name if name is None else _name(name)
        view.query = view.query if query is None else _query(user, query)
        _write(view)
    return _items(user, [view])[0]


@transaction.atomic
def delete_view(user: User, view_id: int) -> None:
    """Delete a view. It can be restored until the same user deletes another one.

    Raises:
        SavedView.DoesNotExist, PermissionDenied.
    """
    view = _changeable(user, view_id)
    SavedView.objects.filter(owner_id=view.owner_id, deleted_at__isnull=False).delete()
    view.deleted_at = clock.now()
    view.save(update_fields=["deleted_at"])


def restore_view(user: User, view_id: int) -> ViewItem:
    """Restore a deleted view, also as the default of those users who had it.

    Raises:
        SavedView.DoesNotExist: permanently deleted. PermissionDenied. ViewRefused: its name is taken meanwhile.
    """
    with transaction.atomic():
        view = _accessible(user).select_for_update(of=("self",)).filter(deleted_at__isnull=False).get(pk=view_id)
        _demand_change(user, view)
        view.deleted_at = None
        _write(view)
    return _items(user, [view])[0]


@transaction.atomic
def set_default(user: User, view_id: int | None) -> None:
    """Set the default view, or all runs. Raises `SavedView.DoesNotExist`."""
    if view_id is None:
        DefaultView.objects.filter(user_id=user.pk).delete()
        return
    view = visible_views(user).get(pk=view_id)
    DefaultView.objects.update_or_create(user_id=user.pk, defaults={"view": view})


def _changeable(user: User, view_id: int) -> SavedView:
    view = visible_views(user).select_for_update(of=("self",)).get(pk=view_id)
    _demand_change(user, view)
    return view


def _demand_change(user: User, view: SavedView) -> None:
    if view.owner_id != user.pk and view.team_id is not None:
        demand(user, Action.STEER_ANY_RUN, view.team_id)


def _name(name: str) -> str:
    name = " ".join(name.split())
    if not name or len(name) > LONGEST_NAME or "\0" in name:
        raise ViewRefused(f"A view's name has 1 to {LONGEST_NAME} characters.")
    return name


def _query(user: User, query: dict[str, str]) -> dict[str, str]:
    """The query parameters to store. Raises ViewRefused when they are not valid."""
    stored = {name: query[name] for name in KEPT if query.get(name)}
    if stored.get("show", SHOWN[0]) not in SHOWN:
        raise ViewRefused(f"`show` must be one of {', '.join(SHOWN)}.")
    project = stored.get("project", "")
    if project and not (project.isdecimal() and len(project) < 19 and visible_projects(user).filter(pk=int(project)).exists()):
        raise ViewRefused("Project not found.")
    try:
        apply_filter(Run.objects.all(), stored.get("q", ""))
        parse_columns(stored.get("cols", ""))
        if stored.get("sort"):
            sort_expression(stored["sort"].removeprefix("-"))
    except FilterError as error:
        raise ViewRefused(error.message) from error
    return stored


def _write(view: SavedView) -> None:
    try:
        with transaction.atomic():
            view.save()
    except IntegrityError as error:
        whose = f"In {view.team.name} there is" if view.team is not None else "There is"
        raise ViewRefused(f"{whose} already a view with this name.") from error


def _items(user: User, views: Iterable[SavedView]) -> list[ViewItem]:
    default = default_view(user)
    managed = set(memberships(user).filter(role__in=granting_roles(Action.STEER_ANY_RUN)).values_list("team_id", flat=True))
    return [
        ViewItem(
            id=view.pk,
            name=view.name,
            team=view.team.name if view.team is not None else "",
            owner=view.owner.username,
            query=view_query(view),
            default=default is not None and default.pk == view.pk,
            may_change=view.owner_id == user.pk or view.team_id in managed,
        )
        for view in views
    ]
