"""Metrics of a run as columns: all points, fetched by step windows, or downsampled."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from oppo_client.errors import UnknownMetric
from oppo_client.messages import get
from oppo_client.tables import Table
from oppo_client.transport import Session
from oppo_client.validation import METRICS, RUN

# Axis names → axes of the API.
AXES = {"step": "step", "tokens": "tokens", "gpu_seconds": "gpu_seconds", **dict.fromkeys(("wall", "wall_time"), "wall")}
# Points of one series that a call returns without downsampling.
WINDOW = 20_000

Series = dict[str, dict[str, list[Any]]]


def fetch_metrics(session: Session, run_id: int, keys: str | Iterable[str], x: str, max_points: int | None) -> Table:
    """Columns `step`, the axis (unless it is the step), and one per key; one row per step with a value of any key.

    Downsampled series have two more columns, `KEY low` and `KEY high`. Raises `UnknownMetric`, and `ValueError` for another axis.
    """
    names = [keys] if isinstance(keys, str) else list(keys)
    check_axis(x)
    if not names or any(not name or "," in name for name in names):
        raise ValueError("give the names of metrics, each without commas")
    path = f"runs/{run_id}/metrics"
    if max_points is None:
        series = _fetch_windows(session, path, names, AXES[x])
    else:
        series = session.json(get(path, keys=names, x=AXES[x], max_points=max_points), METRICS)["series"]
    missing = [name for name in names if not name.endswith("*") and not series.get(name, {}).get("step")]
    if missing or not series:
        _check_known(session, run_id, missing or names)
    return join_series(series, x)


def check_axis(x: str) -> None:
    """Raise `ValueError` for an unknown axis."""
    if x not in AXES:
        raise ValueError(f"x is {x!r}; must be one of {', '.join(AXES)}")


def _fetch_windows(session: Session, path: str, names: list[str], x: str) -> Series:
    """All points, by windows of steps that are not downsampled."""
    series: Series = {}
    since = -1
    while True:
        request = get(path, keys=names, x=x, max_points=WINDOW, since_step=since, to_step=since + WINDOW)
        reply = session.json(request, METRICS)
        for key, columns in reply["series"].items():
            merged = series.setdefault(key, {})
            for name, values in columns.items():
                merged.setdefault(name, []).extend(values)
        since += WINDOW
        if since >= reply["last_step"]:
            return series


def _check_known(session: Session, run_id: int, names: list[str]) -> None:
    """Raise `UnknownMetric` unless the run has these metrics; a known metric may still have no values."""
    latest = session.json(get(f"runs/{run_id}"), RUN)["latest"]
    unknown = [name for name in names if not (name.endswith("*") and any(key.startswith(name[:-1]) for key in latest))]
    unknown = [name for name in unknown if name not in latest]
    if not unknown:
        return
    if not latest:
        raise UnknownMetric(f"Run {run_id} has no metrics yet.")
    near = difflib.get_close_matches(unknown[0], latest, n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise UnknownMetric(f"Run {run_id} has no metric {unknown[0]}.{hint} `run.latest` lists all metrics.")


def join_series(series: Mapping[str, Mapping[str, list[Any]]], x: str) -> Table:
    """Series of different steps in one table; NaN for missing and non-finite values."""
    x_values: dict[int, Any] = {}
    for columns in series.values():
        x_values.update(zip(columns["step"], columns["x"], strict=True))
    steps = sorted(x_values)
    row = {step: i for i, step in enumerate(steps)}
    table = Table(step=steps)
    if x != "step":
        table[x] = [_to_float(x_values[step]) for step in steps]
    for key, columns in series.items():
        titles = {key: "y", f"{key} low": "low", f"{key} high": "high"}
        for title, name in titles.items():
            if name in columns:
                values = [math.nan] * len(steps)
                for step, value in zip(columns["step"], columns[name], strict=True):
                    values[row[step]] = _to_float(value)
                table[title] = values
    return table


def _to_float(value: float | None) -> float:
    return math.nan if value is None else float(value)
