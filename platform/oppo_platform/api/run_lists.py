"""Lists of runs over HTTP: filtered, sorted; and their names, tags and notes (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from ninja import Query, Router, Schema
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from oppo_contract.sections.base import Name
from oppo_contract.states import RunState
from oppo_platform.api.lookups import RunId, caller, chosen_project, get_run_row, get_run_summary, managing_actor
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import problem
from oppo_platform.projects.access import may_submit
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.filter_completion import words
from oppo_platform.runs.filtering import FilterError
from oppo_platform.runs.labels import LONGEST_NOTES, MOST_TAGS, NotesChanged, TagRefused, change_tags, rename_run, set_notes
from oppo_platform.runs.lifecycle import archive_run, unarchive_run
from oppo_platform.runs.pins import pin, pinned_runs, unpin

router = Router()
FILTER = "A filter as in the runs table (docs/runs.md), such as `state:running reward>0.5`."


class TagsBody(Schema):
    """Tags to add and to remove."""

    model_config = ConfigDict(extra="forbid")

    add: list[str] = Field(default=[], max_length=MOST_TAGS, description="Tags to add.")
    remove: list[str] = Field(default=[], max_length=MOST_TAGS, description="Tags to remove.")


class NameBody(Schema):
    """A new name."""

    model_config = ConfigDict(extra="forbid")

    name: Name = Field(description="The run's name, one line of text.")


class NotesBody(Schema):
    """New notes."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(max_length=LONGEST_NOTES, pattern=r"^[^\x00]*$", description="Markdown; empty: no notes.")
    before: str | None = Field(None, description="The notes that were edited: 409 if they have changed since.")


class FilterField(TypedDict):
    """A field of the filter."""

    name: str
    kind: Literal["text", "number"]
    says: str


class TableColumn(TypedDict):
    """A column of the table."""

    name: str
    title: str
    says: str


class Words(TypedDict):
    """Completion data of the run filter."""

    fields: list[FilterField]
    values: dict[str, list[str]]
    metrics: list[str]
    settings: list[str]
    columns: list[TableColumn]


class Pinned(TypedDict):
    """Pinned runs, at most one per project."""

    items: list[runs.RunSummary]
    next: str | None


def list_runs(
    request: HttpRequest,
    state: Annotated[str, Query(description="Only runs in these states, separated by commas.")] = "",
    project: Annotated[str, Query(description="Only runs of this project, by name or number.")] = "",
    where: Annotated[str, Query(alias="filter", description=FILTER)] = "",
    sort: Annotated[str, Query(description="A column of the runs table; with a leading `-` descending, as `-reward`.")] = "",
    limit: Limit = 50,
    cursor: Cursor = "",
) -> runs.RunList | Any:
    """Newest first, or sorted by a column (`-reward`: descending). `state` takes several, separated by commas."""
    states = [word for word in state.split(",") if word]
    unknown = [word for word in states if word not in set(RunState)]
    if unknown:
        return problem(422, f"Unknown state {unknown[0]}; states are {', '.join(RunState)}.")
    requested = chosen_project(caller(request), project) if project else None
    try:
        return runs.list_runs(
            caller(request), states=states, project=requested, where=where, sort=sort, limit=limit, cursor=cursor
        )
    except FilterError as error:
        return problem(422, error.message, term=error.term)


@router.get("runs/words", summary="Filter fields and their values")
def list_filter_words(request: HttpRequest) -> Words:
    """Fields with their descriptions, existing values, and metrics, for completion."""
    return words(caller(request))


@router.get("runs/pinned", summary="The pinned baselines")
def list_pinned_runs(
    request: HttpRequest,
    project: Annotated[str, Query(description="Only that of this project, by name or number.")] = "",
    limit: Limit = MOST,
    cursor: Cursor = "",
) -> Pinned:
    """At most one run per project: the baseline of its other runs."""
    user = caller(request)
    requested = chosen_project(user, project).pk if project else None
    return Pinned(**paged(runs.existing_runs(user, pinned_runs(user, requested)), limit, cursor, runs.run_summary))


@router.post("runs/{int:run_id}/pin", summary="Make a run its project's baseline")
def pin_run(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """Replaces the previous one. Requires permission to submit to the project."""
    pin(run_id, _changes(request, run_id))
    return get_run_summary(request, run_id)


@router.post("runs/{int:run_id}/unpin", summary="Remove a project's baseline")
def unpin_run(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """Idempotent."""
    unpin(run_id, _changes(request, run_id))
    return get_run_summary(request, run_id)


def _changes(request: HttpRequest, run_id: int) -> str:
    """The caller as an actor. Raises `Run.DoesNotExist` and `PermissionDenied`."""
    user, run = caller(request), get_run_row(request, run_id)
    if not may_submit(user, run.project):
        raise PermissionDenied("Viewers cannot change runs.")
    return f"user:{user.username}"


@router.post("runs/{int:run_id}/archive", summary="Archive a run", operation_id="archive_run")
def archive(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """The filter `archived:yes` finds it, and its page stays. 409 unless it has ended; 403 if you may not manage it."""
    archive_run(run_id, managing_actor(request, run_id))
    return get_run_summary(request, run_id)


@router.post("runs/{int:run_id}/unarchive", summary="Unarchive a run", operation_id="unarchive_run")
def unarchive(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """Idempotent. 403 if you may not manage it."""
    unarchive_run(run_id, managing_actor(request, run_id))
    return get_run_summary(request, run_id)


@router.post("runs/{int:run_id}/tags", summary="Change a run's tags")
def tag_run(request: HttpRequest, run_id: RunId, body: TagsBody) -> runs.RunSummary | Any:
    """Requires permission to submit to the run's project. 422 for an invalid tag."""
    actor = _changes(request, run_id)
    try:
        change_tags(run_id, body.add, body.remove, actor)
    except TagRefused as error:
        return problem(422, str(error))
    return get_run_summary(request, run_id)


@router.post("runs/{int:run_id}/rename", summary="Rename a run")
def rename(request: HttpRequest, run_id: RunId, body: NameBody) -> runs.RunSummary:
    """Its spec keeps the name that it was submitted with. Requires permission to submit to the run's project."""
    rename_run(run_id, body.name, _changes(request, run_id))
    return get_run_summary(request, run_id)


@router.post("runs/{int:run_id}/notes", summary="Change a run's notes")
def change_notes(request: HttpRequest, run_id: RunId, body: NotesBody) -> runs.RunSummary | Any:
    """Markdown, which `GET runs/{id}` returns. Requires permission to submit to the run's project."""
    try:
        set_notes(run_id, body.text, _changes(request, run_id), body.before)
    except NotesChanged as error:
        return problem(409, str(error))
    return get_run_summary(request, run_id)
