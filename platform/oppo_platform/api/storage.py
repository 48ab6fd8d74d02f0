"""Deleting runs over HTTP, and the trash (docs/storage.md)."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Router, Status
from typing_extensions import TypedDict

from oppo_platform.accounts.access import visible_teams
from oppo_platform.api.lookups import LARGEST_ID, RunId, caller, check_may_manage, get_run_row, get_run_summary, managing_actor
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.access import trashed_runs
from oppo_platform.runs.models import Run
from oppo_platform.storage.selectors import Taken, TeamTaken, taken_by, teams_taken
from oppo_platform.storage.trash import Trashed, delete_run, in_trash, purge_now, restore_run, trashed

router = Router()


class Storage(TypedDict):
    """Storage of teams, a page of them."""

    items: list[TeamTaken]
    next: str | None


class Trash(TypedDict):
    """Deleted runs, the newest deletion first; a page of them."""

    items: list[Trashed]
    next: str | None


def delete(request: HttpRequest, run_id: RunId) -> Trashed:
    """Moves the run to the trash, from where it can be restored for some days. 409 unless it has ended and no run needs its
    checkpoints."""
    return trashed(delete_run(run_id, managing_actor(request, run_id)))


@router.post("runs/{int:run_id}/restore", summary="Restore a run from the trash", operation_id="restore_run")
def restore(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """Restores it unchanged. 404 if it is not in the trash."""
    restore_run(run_id, check_may_manage(request, _in_trash(request, run_id)))
    return get_run_summary(request, run_id)


@router.get("runs/{int:run_id}/storage", summary="Storage used by a run")
def show_storage(request: HttpRequest, run_id: RunId) -> Taken:
    """Bytes by part, as last measured by the housekeeper."""
    return taken_by(get_run_row(request, run_id))


@router.get("storage", summary="Storage used by your teams' runs")
def list_storage(request: HttpRequest, limit: Limit = MOST, cursor: Cursor = "") -> Storage:
    """Each with its quota (null: none), its largest runs, and `to_delete`: folders of deleted runs that still are on a node's
    disk, or (node null) the platform's."""
    page = paged(list(visible_teams(caller(request))), limit, cursor)
    return Storage(items=teams_taken(page["items"]), next=page["next"])


@router.get("trash", summary="Deleted runs that can be restored")
def list_trash(request: HttpRequest, limit: Limit = MOST, cursor: Cursor = "") -> Trash:
    """Those of your teams, newest deletion first."""
    return Trash(**paged(in_trash(caller(request)), limit, cursor, trashed, key="run_id"))


@router.post("runs/{int:run_id}/purge", summary="Delete a run in the trash permanently", response={204: None})
def purge_run(request: HttpRequest, run_id: RunId) -> Status:
    """With the next round of housekeeping. 404 if it is not in the trash."""
    purge_now(run_id, check_may_manage(request, _in_trash(request, run_id)))
    return Status(204, None)


def _in_trash(request: HttpRequest, run_id: int) -> Run:
    if run_id > LARGEST_ID:
        raise Run.DoesNotExist
    return trashed_runs(caller(request)).select_related("project").get(pk=run_id)
