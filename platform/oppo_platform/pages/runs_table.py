"""The runs table for its template: sortable headers, a cell per run and column, and differences from the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from oppo_platform.pages.templatetags.oppo_format import NONE, duration, figure, fixed, percent, signed
from oppo_platform.runs.columns import COMPARED, Column, difference, value

# Kinds of cells that the template renders.
DRAWN = frozenset({"state", "progress", "curve", "status", "moment"})


@dataclass(frozen=True, slots=True)
class Cell:
    """One value of a run. `delta`: difference from the baseline's; `same`: a setting equal to the baseline's."""

    key: str
    kind: str
    title: str
    numeric: bool
    text: str = ""
    delta: str = ""
    same: bool = False


def heads(columns: Sequence[Column], params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Headers of the table. A sortable one has the query that sorts by it: in its usual direction first, then reversed."""
    return [{"key": "name", "title": "Name", "order": _order("name", params), "query": _turned("name", "", params)}] + [
        {
            "key": column.key,
            "title": column.title,
            "numeric": column.numeric,
            "order": _order(column.sort, params),
            "query": _turned(column.sort, column.first, params) if column.sort else None,
        }
        for column in columns
    ]


def _order(sort: str, params: Mapping[str, Any]) -> str:
    if not sort or params["sort"].removeprefix("-") != sort:
        return ""
    return "descending" if params["sort"].startswith("-") else "ascending"


def _turned(sort: str, first: str, params: Mapping[str, Any]) -> str:
    now = _order(sort, params)
    return query({**params, "sort": {"descending": "", "ascending": "-"}.get(now, first) + sort})


def rows(
    columns: Sequence[Column], runs: Sequence[dict[str, Any]], specs: Mapping[int, dict[str, Any]], baselines: Sequence[int]
) -> list[dict[str, Any]]:
    """The runs with `cells`, and `pinned` for baselines, which have no difference."""
    by_project = {(run["team"], run["project"]): run for run in runs if run["id"] in baselines}
    return [
        {
            **run,
            "pinned": run["id"] in baselines,
            "cells": [_cell(column, run, specs, by_project.get((run["team"], run["project"]))) for column in columns],
        }
        for run in runs
    ]


def _cell(column: Column, run: dict[str, Any], specs: Mapping[int, dict[str, Any]], baseline: dict[str, Any] | None) -> Cell:
    if column.kind in DRAWN:
        return Cell(column.key, column.kind, column.title, column.numeric)
    own = value(column, run, specs.get(run["id"]))
    cell = Cell(column.key, column.kind, column.title, column.numeric, _text(column, own))
    if baseline is None or baseline["id"] == run["id"] or column.kind not in COMPARED:
        return cell
    reference = value(column, baseline, specs.get(baseline["id"]))
    more = difference(own, reference)
    return replace(cell, delta=_delta(column, more) if more else "", same=column.kind == "setting" and own == reference)


def _text(column: Column, own: Any) -> str:
    if own is None:
        return NONE
    match column.kind:
        case "share":
            return percent(own)
        case "seconds":
            return duration(own)
        case "whole":
            return fixed(own, 0)
        case "figure":
            return fixed(own) if column.key in ("reward", "kl") else figure(own)
        case _:
            return str(own).lower() if isinstance(own, bool) else str(own)


def _delta(column: Column, more: float) -> str:
    """`+0.12`, `−3.1 %`, `+2 m 3 s`."""
    match column.kind:
        case "share":
            return signed(more, percent)
        case "seconds":
            return signed(more, duration)
        case "whole" | "setting" if float(more).is_integer():
            return signed(more, lambda size: fixed(size, 0))
        case _:
            return signed(more, fixed if column.key in ("reward", "kl") else figure)


def query(values: Mapping[str, Any]) -> str:
    """A query string of the non-empty values; commas and slashes of columns stay readable."""
    return urlencode({name: value for name, value in values.items() if value not in (None, "")}, safe=",/")
