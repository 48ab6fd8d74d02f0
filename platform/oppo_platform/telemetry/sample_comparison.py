"""Responses to the same prompt side by side: prompts are rows, steps of runs are columns (`sample_columns`).

Prompts are identified by their text (`SampleRow.prompt_key`). A cell is the newest response to the prompt within the column's
steps. Prompts with a response in one column alone are left out, because nothing stands beside it. Texts come from users and
models: show them as text, never as markup.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Literal

from asgiref.sync import sync_to_async
from django.db import connection

from oppo_platform.cursors import read_cursor, write_cursor
from oppo_platform.runs.models import Run
from oppo_platform.telemetry.metric_reader import END, AttemptRange, Parts, attempt_ranges_by_run
from oppo_platform.telemetry.models import SampleRow
from oppo_platform.telemetry.sample_columns import Column, Steps, StepWord, choose_columns, offered_steps, reward_change
from oppo_platform.telemetry.samples import Ending, as_item, cut_texts
from oppo_platform.telemetry.search import search_terms

PROMPTS_A_READ = 100
ALL_PROMPTS = 2**62

Order = Literal["change", "best", "worst", "prompt"]


@dataclass(frozen=True, slots=True)
class ResponseFilter:
    """A prompt is listed if one of its shown responses meets all conditions that are not None (or empty); inclusive bounds."""

    min_score: float | None = None
    max_score: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    ending: Ending | None = None
    prompt: str = ""
    """The `prompt_key` of a prompt: only this one."""
    words: str = ""
    """Search terms (`search.search_terms`) that prompt or response must contain, case-insensitive."""


@dataclass(frozen=True, slots=True)
class SampleComparison:
    """The columns, the parts of attempts that they show, and how the prompts are chosen and ordered."""

    columns: list[Column]
    offered: list[int]
    parts: Parts
    held_out: bool
    filters: ResponseFilter
    order: Order

    @property
    def several_runs(self) -> bool:
        """Whether the columns are of more than one run."""
        return len({column.run_id for column in self.columns}) > 1


def compare_samples(
    runs: Sequence[Run], requested: Sequence[int | StepWord], *, held_out: bool, filters: ResponseFilter, order: Order
) -> SampleComparison:
    """Choose the columns for these runs and steps. Raises `TooManyColumns`."""
    parts = attempt_ranges_by_run(runs)
    recorded = _recorded_steps(parts, held_out)
    columns = choose_columns(recorded, requested, held_out=held_out)
    return SampleComparison(columns, offered_steps(recorded), parts, held_out, filters, order)


def list_prompts(comparison: SampleComparison, *, limit: int, cursor: str = "", excerpt: int = 0) -> dict[str, Any]:
    """One page of prompts: `{"items": [{"prompt_key", "change", "samples"}], "next": cursor of the following page or None}`.

    `samples` has the sample of each column or None: Sample + id, step, prompt_key, run.
    `change` is that of `reward_change`. With `excerpt`, prompts and responses are cut to that many characters.

    Raises:
        BadCursor: `cursor` is no `next` of this listing.
    """
    after = read_cursor(cursor, (int, float), (int, float), str) if cursor else None
    cells = _read_cells(comparison, after, limit + 1)
    prompts = _by_prompt(cells)
    last = prompts[limit - 1][0] if len(prompts) > limit else None
    return {
        "items": _with_texts(comparison, prompts[:limit], excerpt),
        "next": write_cursor(last.rank, last.number, last.prompt_key) if last else None,
    }


async def export_responses(comparison: SampleComparison) -> AsyncIterator[bytes]:
    """Newline-delimited JSON: a line for every response of the listing, in its order, uncut: `{"column", "run", "id", …}`."""
    # The order is that of one moment; only the texts are read bit by bit.
    prompts = _by_prompt(await sync_to_async(_read_cells)(comparison, None, ALL_PROMPTS))
    for start in range(0, len(prompts), PROMPTS_A_READ):
        part = await sync_to_async(_with_texts)(comparison, prompts[start : start + PROMPTS_A_READ], 0)
        lines = (
            json.dumps({"column": column, **sample}, ensure_ascii=False) + "\n"
            for prompt in part
            for column, sample in enumerate(prompt["samples"])
            if sample is not None
        )
        yield "".join(lines).encode()


@dataclass(frozen=True, slots=True)
class _Cell:
    """A response of a listed prompt; `rank`, `number` and `prompt_key` are the prompt's place in the order."""

    rank: float
    number: float
    prompt_key: str
    column: int
    sample_id: int


def _by_prompt(cells: Sequence[_Cell]) -> list[list[_Cell]]:
    return [list(of_prompt) for _, of_prompt in groupby(cells, key=lambda cell: cell.prompt_key)]


def _with_texts(comparison: SampleComparison, prompts: Sequence[Sequence[_Cell]], excerpt: int) -> list[dict[str, Any]]:
    rows = SampleRow.objects.defer("searched").in_bulk([cell.sample_id for cells in prompts for cell in cells])
    return [_as_prompt(comparison, cells, rows, excerpt) for cells in prompts]


def _as_prompt(
    comparison: SampleComparison, cells: Sequence[_Cell], rows: Mapping[int, SampleRow], excerpt: int
) -> dict[str, Any]:
    samples: list[dict[str, Any] | None] = [None] * len(comparison.columns)
    words = search_terms(comparison.filters.words)
    for cell in cells:
        if (row := rows.get(cell.sample_id)) is not None:  # otherwise deleted meanwhile
            item = as_item(row) | {"run": comparison.columns[cell.column].run_id}
            samples[cell.column] = cut_texts(item, excerpt, words) if excerpt else item
    rewards = [None if sample is None else sample["score"] for sample in samples]
    change = reward_change(rewards, several_runs=comparison.several_runs)
    return {"prompt_key": cells[0].prompt_key, "change": change, "samples": samples}


def _recorded_steps(parts: Parts, held_out: bool) -> dict[int, Steps]:
    """By run: the steps with evaluation samples; of training, where every step has samples, all from the first to the last."""
    shown = [(run_id, part.attempt.pk, _last(part, END)) for run_id, of_run in parts.items() for part in of_run]
    found: dict[int, set[int]] = {run_id: set() for run_id in parts}
    for run_id, step in _rows(EVALUATED if held_out else TRAINED, shown, []):
        found[run_id].add(step)
    if held_out:
        return {run_id: sorted(steps) for run_id, steps in found.items()}
    return {run_id: range(min(steps), max(steps) + 1) if steps else () for run_id, steps in found.items()}


def _read_cells(comparison: SampleComparison, after: Sequence[Any] | None, most: int) -> list[_Cell]:
    """The cells of at most that many prompts after the cursor's, in the listing's order."""
    columns = comparison.columns
    shown = [
        (place, part.attempt.pk, column.first, _last(part, column.last))
        for place, column in enumerate(columns)
        if column.first is not None and column.last is not None
        for part in comparison.parts[column.run_id]
    ]
    filters, conditions = comparison.filters, _conditions(comparison.filters)
    rank = SPREAD if comparison.order == "change" and comparison.several_runs else RANKS[comparison.order]
    statement = PROMPTS.format(rank=rank, conditions=" AND ".join(condition for condition, _ in conditions) or "true")
    place = after or (float("-inf"), float("-inf"), "")
    values = [
        comparison.held_out,
        filters.prompt,
        filters.prompt,
        min(2, len(columns)),
        *chain.from_iterable(values for _, values in conditions),
    ]
    return [_Cell(*row) for row in _rows(statement, shown, [*values, *place, most])]


def _last(part: AttemptRange, step: int) -> int:
    """The last step up to this one that no newer attempt hides."""
    return step if part.before is None else min(step, part.before - 1)


def _rows(statement: str, shown: Sequence[tuple[int, ...]], values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Results of a statement whose first parameters are the columns of `shown`."""
    if not shown:
        return []
    with connection.cursor() as cursor:
        cursor.execute(statement, [*map(list, zip(*shown, strict=True)), *values])
        return cursor.fetchall()


def _conditions(filters: ResponseFilter) -> list[tuple[str, Sequence[Any]]]:
    """SQL conditions on a response, each with its parameters."""
    bounds = {
        "score >= %s": filters.min_score,
        "score <= %s": filters.max_score,
        "length >= %s": filters.min_length,
        "length <= %s": filters.max_length,
        "ending = %s": filters.ending,
    }
    conditions: list[tuple[str, Sequence[Any]]] = [(text, [value]) for text, value in bounds.items() if value is not None]
    words = search_terms(filters.words)
    # Both sides use the database's lower case: its rules and Python's differ in a few letters.
    has_words = " AND ".join(["strpos(s.searched, lower(%s)) > 0"] * len(words))
    return [*conditions, (TEXT.format(has_words=has_words), words)] if words else conditions


SAMPLES = SampleRow._meta.db_table
TEXT = f"EXISTS (SELECT FROM {SAMPLES} s WHERE s.id = newest.id AND {{has_words}})"
# Smaller comes first, null last.
KNOWN = "FILTER (WHERE score IS NOT NULL)"
RANKS = {
    "best": "-max(score)",
    "worst": "min(score)",
    "change": f"""CASE WHEN count(score) > 1 THEN
        -abs((array_agg(score ORDER BY place DESC) {KNOWN})[1] - (array_agg(score ORDER BY place) {KNOWN})[1]) END""",
    "prompt": "0::float8",
}
SPREAD = "CASE WHEN count(score) > 1 THEN min(score) - max(score) END"
# One look-up in the index for each evaluation, however many samples it has.
EVALUATED = f"""
    WITH RECURSIVE shown AS (SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS w(run_id, attempt_id, last)),
    evaluated AS (
        SELECT w.*, (SELECT min(step) FROM {SAMPLES} WHERE attempt_id = w.attempt_id AND held_out) AS step FROM shown w
        UNION ALL
        SELECT run_id, attempt_id, last,
            (SELECT min(s.step) FROM {SAMPLES} s WHERE s.attempt_id = e.attempt_id AND s.held_out AND s.step > e.step)
        FROM evaluated e WHERE step < last
    )
    SELECT DISTINCT run_id, step FROM evaluated WHERE step <= last
"""  # noqa: S608
TRAINED = f"""
    WITH shown AS (SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[]) AS w(run_id, attempt_id, last))
    SELECT w.run_id, ends.step FROM shown w CROSS JOIN LATERAL (
        SELECT min(step) AS step FROM {SAMPLES} WHERE attempt_id = w.attempt_id AND NOT held_out AND step <= w.last
        UNION
        SELECT max(step) FROM {SAMPLES} WHERE attempt_id = w.attempt_id AND NOT held_out AND step <= w.last
    ) ends WHERE ends.step IS NOT NULL
"""  # noqa: S608
# The newest response to each prompt in each column, from the index `sample_by_split` alone; then the prompts in their order.
PROMPTS = f"""
    WITH shown AS (
        SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[]) AS w(place, attempt_id, first, last)
    ),
    newest AS MATERIALIZED (
        SELECT DISTINCT ON (w.place, s.prompt_key) w.place, s.prompt_key, s.id, s.score, s.length, s.ending, s.sequence_id
        FROM shown w JOIN {SAMPLES} s ON s.attempt_id = w.attempt_id AND s.held_out = %s AND s.step BETWEEN w.first AND w.last
        WHERE %s::text = '' OR s.prompt_key = %s
        ORDER BY w.place, s.prompt_key, s.step DESC, s.id DESC
    ),
    ranked AS (
        SELECT prompt_key, coalesce({{rank}}, 'infinity')::float8 AS rank, coalesce(min(sequence_id), 'infinity') AS number
        FROM newest GROUP BY prompt_key HAVING count(*) >= %s AND bool_or({{conditions}})
    ),
    page AS (
        SELECT * FROM ranked WHERE (rank, number, prompt_key) > (%s::float8, %s::float8, %s)
        ORDER BY rank, number, prompt_key LIMIT %s
    )
    SELECT rank, number, prompt_key, place, id FROM page JOIN newest USING (prompt_key) ORDER BY rank, number, prompt_key, place
"""  # noqa: S608
