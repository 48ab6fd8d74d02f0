"""Recorded answers of a run: filtered, sorted, searched, and compared with other answers to the same prompt.

Texts come from users and models: show them as text, never as markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from django.db.models import F, FloatField, Q, QuerySet, TextField, Value
from django.db.models.functions import Coalesce, Lower

from oppo_platform.cursors import read_cursor, write_cursor
from oppo_platform.runs.models import Run
from oppo_platform.telemetry.metric_reader import attempt_ranges
from oppo_platform.telemetry.models import SampleRow
from oppo_platform.telemetry.search import search_terms

MOST_SAMPLES = 200
MOST_SAME_PROMPT = 500
BEFORE_A_HIT = 40

Column = Literal["step", "score", "kl", "length", "age", "version", "ending"]
Ending = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Filter of answers: every condition that is not None (or empty) must hold; bounds are inclusive."""

    from_step: int | None = None
    to_step: int | None = None
    min_score: float | None = None
    max_score: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    min_age: int | None = None
    max_age: int | None = None
    ending: Ending | None = None
    held_out: bool | None = None
    prompt: str = ""
    """The `prompt_key` of an answer: answers to the same prompt."""
    words: str = ""
    """Search terms (`search.search_terms`) that prompt or answer must contain, case-insensitive."""


def samples(
    run: Run,
    filters: SampleFilter,
    *,
    by: Column = "step",
    descending: bool = True,
    limit: int = 20,
    cursor: str = "",
    excerpt: int = 0,
) -> dict[str, Any]:
    """One page of answers: `{"items": [Sample + id, step, prompt_key], "next": cursor of the following page or None}`.

    With `excerpt` prompts and answers are cut to about that many characters from shortly before the first search hit on, and
    `stale_response` and `messages` are left out: a list of long answers would be megabytes.

    Raises:
        BadCursor: `cursor` is no `next` of this listing.
    """
    limit = max(1, min(limit, MOST_SAMPLES))
    rows = _matching(_visible(run), filters).annotate(place=_place(by))
    if cursor:
        rows = rows.filter(_beyond(cursor, by, descending))
    sign = "-" if descending else ""
    # Places first, which the index `sample_by_split` has for most columns: sorting whole rows would read all their texts.
    page = list(rows.order_by(f"{sign}place", f"{sign}id").values_list("place", "pk")[: limit + 1])
    found = SampleRow.objects.defer("searched").in_bulk([pk for _, pk in page[:limit]])
    items = [as_item(found[pk]) for _, pk in page[:limit] if pk in found]
    if excerpt:
        items = [cut_texts(item, excerpt, search_terms(filters.words)) for item in items]
    return {"items": items, "next": write_cursor(*page[limit - 1]) if len(page) > limit else None}


def sample(run: Run, sample_id: int) -> dict[str, Any]:
    """One answer, and under `same_prompt` the figures (no texts) of every answer to its prompt, oldest step first.

    Raises `SampleRow.DoesNotExist`, also for an answer whose step a newer attempt repeated.
    """
    row = _visible(run).get(pk=sample_id)
    same = _visible(run).filter(prompt_key=row.prompt_key).order_by("-step", "-id")[:MOST_SAME_PROMPT]
    figures = same.values("id", "step", "score", "kl", "length", "age", "held_out")
    counts = ("length", "age")  # stored as floating-point numbers
    same_prompt = [other | {name: None if other[name] is None else int(other[name]) for name in counts} for other in figures]
    return {**as_item(row), "same_prompt": same_prompt[::-1]}


def as_item(row: SampleRow) -> dict[str, Any]:
    """The sample as the API returns it."""
    return {"id": row.pk, "step": row.step, "prompt_key": row.prompt_key, **row.data}


def cut_texts(item: dict[str, Any], length: int, words: list[str]) -> dict[str, Any]:
    """The item with excerpts of about `length` characters instead of its texts, from shortly before the first of the words.

    `excerpt_start` is the place in the response where its excerpt starts; None if the response is whole.
    """
    kept = {name: value for name, value in item.items() if name not in ("stale_response", "messages")}
    prompt, _ = _excerpt(str(item["prompt"]), length, words)
    response, start = _excerpt(str(item["response"]), length, words)
    return kept | {"prompt": prompt, "response": response, "excerpt_start": start}


def _excerpt(text: str, length: int, words: list[str]) -> tuple[str, int | None]:
    """About `length` characters around the first search hit, dots where text is left out; and their start, None if whole."""
    if len(text) <= length:
        return text, None
    low = text.lower()
    hits = [at for at in (low.find(word.lower()) for word in words) if at >= 0]
    first = min(hits, default=0)
    start = max(0, first - BEFORE_A_HIT) if first > length // 4 else 0
    end = start + length
    excerpt = ("… " if start else "") + text[start:end] + (" …" if end < len(text) else "")
    return excerpt, start


def _visible(run: Run) -> QuerySet[SampleRow]:
    """Answers of every attempt, without steps that a newer attempt repeated."""
    visible = Q(pk__in=[])
    for part in attempt_ranges(run):
        visible |= Q(attempt=part.attempt) if part.before is None else Q(attempt=part.attempt, step__lt=part.before)
    return SampleRow.objects.filter(visible).defer("searched")


def _matching(rows: QuerySet[SampleRow], filters: SampleFilter) -> QuerySet[SampleRow]:
    conditions = {
        "step__gte": filters.from_step,
        "step__lte": filters.to_step,
        "score__gte": filters.min_score,
        "score__lte": filters.max_score,
        "length__gte": filters.min_length,
        "length__lte": filters.max_length,
        "age__gte": filters.min_age,
        "age__lte": filters.max_age,
        "ending": filters.ending,
        "held_out": filters.held_out,
        "prompt_key": filters.prompt or None,
    }
    rows = rows.filter(**{name: value for name, value in conditions.items() if value is not None})
    for word in search_terms(filters.words):
        # Both sides use the database's lower case: its rules and Python's differ in a few letters.
        rows = rows.filter(searched__contains=Lower(Value(word, output_field=TextField())))
    return rows


def _place(by: Column) -> Any:
    """The sort key without nulls, which no comparison matches."""
    if by == "ending":
        return Coalesce("ending", Value(""), output_field=TextField())
    return F("step") if by == "step" else Coalesce(by, Value(float("-inf")), output_field=FloatField())


def _beyond(cursor: str, by: Column, descending: bool) -> Q:
    """The rows after the cursor's."""
    place, pk = read_cursor(cursor, str if by == "ending" else (int, float), int)
    way = "lt" if descending else "gt"
    return Q(**{f"place__{way}": place}) | Q(**{"place": place, f"id__{way}": pk})
