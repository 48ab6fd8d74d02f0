"""Metrics of a run as columns: fetched window by window in full, or thinned to so many points."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from oppo_client.errors import UnknownMetric
from oppo_client.retry import Retries
from oppo_client.sans_io import Flow, asked, get
from oppo_client.tables import Table
from oppo_client.validation import METRICS, RUN

# Axes of the API, and what else they may be called.
AXES = {"step": "step", "tokens": "tokens", "gpu_seconds": "gpu_seconds", **dict.fromkeys(("wall", "wall_time"), "wall")}
# Points of one series that one call brings unthinned: a step has one at most.
WINDOW = 20_000

Series = dict[str, dict[str, list[Any]]]


def metrics(run_id: int, keys: str | Iterable[str], x: str, max_points: int | None, retries: Retries) -> Flow[Table]:
    """Columns `step`, the axis (unless it is the step), and one a key, a row for every step at which one of the keys has a value.

    Thinned series have two columns more, `KEY low` and `KEY high`. Raises `UnknownMetric`, and `ValueError` for another axis.
    """
    names = [keys] if isinstance(keys, str) else list(keys)
    if x not in AXES:
        raise ValueError(f"x is {x!r}; must be one of {', '.join(AXES)}")
    if not names or any(not name or "," in name for name in names):
        raise ValueError("give the names of metrics, each without commas")
    if max_points is None:
        found = yield from _whole(run_id, names, AXES[x], retries)
    else:
        told = yield from asked(
            get(f"runs/{int(run_id)}/metrics", keys=names, x=AXES[x], max_points=max_points), retries, METRICS
        )
        found = told["series"]
    missing = [name for name in names if not name.endswith("*") and not found.get(name, {}).get("step")]
    if missing or not found:
        yield from _refuse(run_id, missing or names, retries)
    return joined(found, x)


def _whole(run_id: int, names: list[str], x: str, retries: Retries) -> Flow[Series]:
    """Every point, in windows that the platform does not thin."""
    found: Series = {}
    since = -1
    while True:
        asks = get(f"runs/{int(run_id)}/metrics", keys=names, x=x, max_points=WINDOW, since_step=since, to_step=since + WINDOW)
        told = yield from asked(asks, retries, METRICS)
        for key, columns in told["series"].items():
            kept = found.setdefault(key, {})
            for name, values in columns.items():
                kept.setdefault(name, []).extend(values)
        since += WINDOW
        if since >= told["last_step"]:
            return found


def _refuse(run_id: int, missing: list[str], retries: Retries) -> Flow[None]:
    """Raise `UnknownMetric` for names that the run does not have; one that it has may be without values still."""
    latest = (yield from asked(get(f"runs/{int(run_id)}"), retries, RUN))["latest"]
    unknown = [name for name in missing if not (name.endswith("*") and any(key.startswith(name[:-1]) for key in latest))]
    unknown = [name for name in unknown if name not in latest]
    if not unknown:
        return
    if not latest:
        raise UnknownMetric(f"Run {run_id} has no metrics yet.")
    near = difflib.get_close_matches(unknown[0], latest, n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UnknownMetric(f"Run {run_id} has no metric {unknown[0]}.{hint} `run.latest` lists all metrics.")


def joined(series: Mapping[str, Mapping[str, list[Any]]], x: str) -> Table:
    """Series of different steps in one table; NaN where one has no value, or none that is finite."""
    places: dict[int, Any] = {}
    for columns in series.values():
        places.update(zip(columns["step"], columns["x"], strict=True))
    steps = sorted(places)
    row = {step: i for i, step in enumerate(steps)}
    table = Table(step=steps)
    if x != "step":
        table[x] = [_number(places[step]) for step in steps]
    for key, columns in series.items():
        named = {key: "y", f"{key} low": "low", f"{key} high": "high"}
        for title, name in named.items():
            if name in columns:
                values = [math.nan] * len(steps)
                for step, value in zip(columns["step"], columns[name], strict=True):
                    values[row[step]] = _number(value)
                table[title] = values
    return table


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
