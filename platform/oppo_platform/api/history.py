"""A run's history over HTTP: `runs/{id}/events` (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Query, Router

from oppo_platform.api.lookups import run_of
from oppo_platform.api.paging import Cursor, Limit
from oppo_platform.api.problems import problem
from oppo_platform.telemetry.run_events import KINDS, history

router = Router()


@router.get("runs/{int:run_id}/events", summary="What befell a run")
def show_events(
    request: HttpRequest,
    run_id: int,
    kinds: str = "",
    keeps: bool = False,
    q: Annotated[str, Query(max_length=1000)] = "",
    limit: Limit = 100,
    cursor: Cursor = "",
) -> dict[str, Any] | Any:
    """States, changes, decisions and checkpoints, newest first. `kinds` separated by commas; all of them when empty."""
    run = run_of(request, run_id)
    wanted: list[Any] = [word for word in kinds.split(",") if word]
    unknown = [word for word in wanted if word not in KINDS]
    if unknown:
        return problem(422, f"There is no kind {unknown[0]}; kinds are {', '.join(KINDS)}.")
    return history(run, wanted or KINDS, keeps=keeps, words=q, limit=limit, cursor=cursor)
