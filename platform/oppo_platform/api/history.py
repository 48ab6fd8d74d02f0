"""A run's history over HTTP: `runs/{id}/events` and `runs/{id}/provenance` (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Query, Router
from typing_extensions import TypedDict

from oppo_contract.events import Provenance
from oppo_platform.api.lookups import RunId, get_run_row
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import problem
from oppo_platform.runs.selectors import provenances
from oppo_platform.usecases.run_events import KINDS, Kind, history

router = Router()
NAMES = ", ".join(f"`{kind}`" for kind in KINDS)
WORDS = "Every word, and every phrase in double quotes, occurs, in upper or lower case, also inside a word; at most ten."


class HistoryItem(TypedDict):
    """An event of a run."""

    kind: Kind
    id: int
    at: str | None
    step: int | None
    what: str
    old: str | float | None
    new: str | float | None
    text: str
    actor: str


class History(TypedDict):
    """One page, newest first."""

    items: list[HistoryItem]
    next: str | None


@router.get("runs/{int:run_id}/events", summary="Events of a run")
def list_events(
    request: HttpRequest,
    run_id: RunId,
    kinds: Annotated[str, Query(description=f"Only these kinds, separated by commas: {NAMES}.")] = "",
    keeps: Annotated[bool, Query(description="Also decisions that left the value unchanged.")] = False,
    q: Annotated[str, Query(max_length=1000, description=WORDS)] = "",
    limit: Limit = 100,
    cursor: Cursor = "",
) -> History | Any:
    """State changes, requests, decisions, checkpoints and alerts, newest first. `kinds` separated by commas; all if empty. An
    alert has its condition in `what`, its value in `new` and its threshold in `old`. `at` is null for decisions of older
    versions."""
    run = get_run_row(request, run_id)
    requested: list[Any] = [word for word in kinds.split(",") if word]
    unknown = [word for word in requested if word not in KINDS]
    if unknown:
        return problem(422, f"Unknown kind {unknown[0]}; kinds are {', '.join(KINDS)}.")
    return history(run, requested or KINDS, keeps=keeps, words=q, limit=limit, cursor=cursor)


class AttemptProvenance(TypedDict):
    """What an attempt was made of; attempts count from 1."""

    attempt: int
    provenance: Provenance


class ProvenanceList(TypedDict):
    """One page, newest attempt first."""

    items: list[AttemptProvenance]
    next: str | None


@router.get("runs/{int:run_id}/provenance", summary="What a run was made of")
def show_provenance(request: HttpRequest, run_id: RunId, limit: Limit = MOST, cursor: Cursor = "") -> ProvenanceList:
    """Code, package versions, models, prompts and the command that repeats the run, of its newest attempts that have started."""
    known = [{"attempt": epoch, "provenance": made_of} for epoch, made_of in provenances(get_run_row(request, run_id))]
    return ProvenanceList(**paged(known, limit, cursor, key="attempt"))
