"""Events of a run in one list: state changes, requests, controllers' decisions, checkpoints, alerts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from operator import or_
from typing import Any, Literal, get_args

from django.db.models import F, Q, QuerySet
from django.db.models.functions import Coalesce

from oppo_contract.byte_sizes import size
from oppo_platform.alerts.models import Alert
from oppo_platform.alerts.policy import ANNOUNCEMENTS
from oppo_platform.cursors import BadCursor, read_cursor, write_cursor
from oppo_platform.runs.checkpoints import folder_name
from oppo_platform.runs.models import Change, Checkpoint, Run, Transition
from oppo_platform.telemetry.ingest import finite
from oppo_platform.telemetry.metric_reader import attempt_ranges
from oppo_platform.telemetry.models import Decision
from oppo_platform.telemetry.search import search_terms

MOST_EVENTS = 500

# Order of kinds at equal times.
Kind = Literal["decision", "checkpoint", "change", "state", "alert", "alert_closed"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Source:
    """Rows of one kind, with the time of each as `when`; the columns for search; and the conversion of a row."""

    rows: QuerySet[Any]
    searched: Sequence[str]
    convert: Callable[[Any], dict[str, Any]]


def history(
    run: Run, kinds: Sequence[Kind] = KINDS, *, keeps: bool = False, words: str = "", limit: int = 100, cursor: str = ""
) -> dict[str, Any]:
    """One page, newest first: `{"items": [{kind, id, at, step, what, old, new, text, actor}], "next": cursor or None}`.

    Args:
        kinds: only these.
        keeps: include decisions that did not change the value.
        words: only rows with each of these terms (`search.search_terms`) in one of their texts.
        limit: number of rows, at most 500.
        cursor: the `next` of the previous page.

    Raises:
        BadCursor: it is no `next` of this listing.
    """
    limit = max(1, min(limit, MOST_EVENTS))
    result: list[tuple[datetime, int, int, dict[str, Any]]] = []
    for rank, kind in enumerate(KINDS):
        if kind in kinds:
            source = SOURCES[kind](run, keeps)
            rows = _matching(source, words).filter(_before(cursor, rank)).order_by("-when", "-id")[: limit + 1]
            result += [(row.when, rank, row.pk, {"kind": kind, "id": row.pk, **source.convert(row)}) for row in rows]
    result.sort(key=lambda event: event[:3], reverse=True)
    when, rank, pk, _ = result[limit - 1] if len(result) > limit else (None, 0, 0, {})
    return {
        "items": [event for *_, event in result[:limit]],
        "next": write_cursor(when.isoformat(), rank, pk) if when is not None else None,
    }


def _before(cursor: str, rank: int) -> Q:
    """Rows of the kind with this rank after the cursor, in descending order of time."""
    if not cursor:
        return Q()
    text, its_rank, pk = read_cursor(cursor, str, int, int)
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadCursor from error
    if when.tzinfo is None:
        raise BadCursor
    if rank == its_rank:
        return Q(when__lt=when) | Q(when=when, pk__lt=pk)
    return Q(when__lte=when) if rank < its_rank else Q(when__lt=when)


def _matching(source: Source, words: str) -> QuerySet[Any]:
    rows = source.rows
    for piece in search_terms(words):
        rows = rows.filter(reduce(or_, (Q(**{f"{column}__icontains": piece}) for column in source.searched)))
    return rows


def _event(at: datetime | None, **more: Any) -> dict[str, Any]:
    event = {"at": at.isoformat() if at else None, "step": None, "what": "", "old": None, "new": None, "text": "", "actor": ""}
    return event | more


def _states(run: Run, keeps: bool) -> Source:
    rows = Transition.objects.filter(run=run).annotate(when=F("at"))
    return Source(rows, ("new", "reason", "actor"), lambda t: _event(t.at, old=t.old, new=t.new, text=t.reason, actor=t.actor))


def _changes(run: Run, keeps: bool) -> Source:
    rows = Change.objects.filter(run=run).annotate(when=F("at"))
    return Source(rows, ("what", "reason", "actor"), lambda c: _event(c.at, what=c.what, text=c.reason, actor=c.actor))


def _decisions(run: Run, keeps: bool) -> Source:
    """Decisions of the steps that count for each attempt. Decisions without a time get their attempt's start."""
    visible = Q(pk__in=[])
    for part in attempt_ranges(run):
        visible |= Q(attempt=part.attempt) if part.before is None else Q(attempt=part.attempt, step__lt=part.before)
    rows = Decision.objects.filter(visible).annotate(when=Coalesce("at", "attempt__created_at"))
    rows = rows if keeps else rows.exclude(old=F("new"))
    return Source(
        rows,
        ("controller", "reason"),
        lambda d: _event(d.at, step=d.step, what=d.controller, old=finite(d.old), new=finite(d.new), text=d.reason),
    )


def _checkpoints(run: Run, keeps: bool) -> Source:
    rows = Checkpoint.objects.filter(run=run).select_related("attempt__node").annotate(when=F("registered_at"))
    return Source(
        rows,
        ("url", "attempt__node__name"),
        lambda c: _event(
            c.registered_at,
            step=c.step,
            what=folder_name(c),
            text=f"{size(c.bytes)}, by attempt {c.attempt.epoch}",
            actor=f"node:{c.attempt.node.name}",
        ),
    )


def _alerts(run: Run, keeps: bool) -> Source:
    rows = Alert.objects.filter(run=run).annotate(when=F("opened_at"))
    return Source(
        rows,
        ("condition", "why"),
        lambda a: _event(a.opened_at, step=a.step, what=a.condition, old=a.threshold, new=a.value, text=a.why),
    )


def _closings(run: Run, keeps: bool) -> Source:
    rows = Alert.objects.filter(run=run, closed_at__isnull=False).exclude(condition__in=ANNOUNCEMENTS)
    return Source(
        rows.annotate(when=F("closed_at")),
        ("condition", "closed_why"),
        lambda a: _event(a.closed_at, what=a.condition, text=a.closed_why),
    )


SOURCES: dict[Kind, Callable[[Run, bool], Source]] = {
    "state": _states,
    "change": _changes,
    "decision": _decisions,
    "checkpoint": _checkpoints,
    "alert": _alerts,
    "alert_closed": _closings,
}
