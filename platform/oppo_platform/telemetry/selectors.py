"""Queries of reported data, merged over a run's attempts: the newer attempt counts from its first recorded step on.

For pages and the API: `metrics(run, keys, …)`, `decisions(run, …)`. Spans: `timelines`; answers: `samples`; lines: `logs`.
The caller has checked that the user may see the run. All results are ready for JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from oppo_platform.runs.models import Run
from oppo_platform.telemetry.blocks import BUCKET, Buckets
from oppo_platform.telemetry.ingest import finite
from oppo_platform.telemetry.metric_reader import EVERYTHING, Parts, Range, attempt_ranges, read_buckets
from oppo_platform.telemetry.metric_writer import Axis
from oppo_platform.telemetry.models import Decision

LEAST_POINTS, MOST_POINTS = 8, 20_000
NO_BUCKETS = np.empty(0, BUCKET)


class Column(TypedDict):
    """One metric: columns of equal length. `y` is None if not finite, `x` if unknown.

    With more points than requested a row represents several: `step` and `x` are their last, `y` is their mean, None if one of
    them is not finite; `low` and `high` are the extremes of the finite ones.
    """

    step: list[int]
    x: list[float | None]
    y: list[float | None]
    low: NotRequired[list[float | None]]
    high: NotRequired[list[float | None]]


class Metrics(TypedDict):
    """Some metrics of a run over one axis."""

    x: Axis
    last_step: int
    series: dict[str, Column]


def metrics(run: Run, keys: Iterable[str], x: Axis = "step", max_points: int = 2000, within: Range = EVERYTHING) -> Metrics:
    """Series of a run, each with at most `max_points` rows that keep every spike.

    Args:
        keys: metric names; one that ends in `*` matches all with that prefix (`bubble/*`).
        x: the axis: step, training seconds, trained response tokens, or device-seconds.
        within: only these steps, for incremental updates and zoom.
    """
    series = columns({run.pk: attempt_ranges(run)}, {run.pk: expand_keys(run, keys)}, x, max_points, within)[run.pk]
    return Metrics(x=x, last_step=run.step, series=series)


def columns(
    parts: Parts, keys: Mapping[int, Sequence[str]], x: Axis, max_points: int, within: Range = EVERYTHING
) -> dict[int, dict[str, Column]]:
    """Series of several runs in one query, by run id and key."""
    requested = {key for names in keys.values() for key in names}
    buckets = read_buckets(parts, requested | ({f"@{x}"} - {"@step"}), within, max_points)
    return {
        run_id: {key: _column(buckets.get((run_id, key), NO_BUCKETS), buckets.get((run_id, f"@{x}")), x) for key in names}
        for run_id, names in keys.items()
    }


def expand_keys(run: Run, keys: Iterable[str]) -> list[str]:
    """The keys without repetition, with patterns replaced by the run's matching metrics."""
    result: dict[str, None] = {}
    for key in keys:
        if key.endswith("*"):
            result.update(dict.fromkeys(name for name in run.latest if name.startswith(key[:-1])))
        else:
            result[key] = None
    return list(result)


def _column(buckets: Buckets, axis: Buckets | None, x: Axis) -> Column:
    steps = buckets["last"].tolist()
    thinned = bool((buckets["count"] > 1).any())
    written = _rounded if thinned else _finite
    column = Column(
        step=steps,
        x=steps if x == "step" else _places(buckets["last"], axis),
        y=written(np.where(buckets["broken"], np.nan, buckets["mean"])),
    )
    if thinned:
        column["low"], column["high"] = written(buckets["low"]), written(buckets["high"])
    return column


def _places(steps: NDArray[np.int32], axis: Buckets | None) -> list[float | None]:
    """Position of steps on an axis; linear between buckets."""
    if axis is None or not len(axis):
        return [None] * len(steps)
    return _finite(np.interp(steps, axis["last"], axis["end"], left=np.nan, right=np.nan))


def _finite(values: NDArray[np.float64]) -> list[float | None]:
    """For JSON: None if a value is not finite."""
    if np.isfinite(values).all():
        return values.tolist()
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    """Rounded to six digits, which halves the bytes; values are for drawing."""
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = np.nan_to_num(5 - np.floor(np.log10(np.abs(values))), posinf=0, neginf=0)
    # Powers of ten are exact, so both ways give the float nearest to the digits, whose text is short.
    up, down = 10.0 ** np.clip(digits, 0, 22), 10.0 ** np.clip(-digits, 0, 22)
    return _finite(np.where(np.abs(digits) > 22, values, np.rint(values * up / down) * down / up))


def decisions(run: Run, since_step: int = 0) -> list[dict[str, Any]]:
    """Decisions of the controllers after each step, in the order of steps."""
    return [
        {"id": d.pk, "step": d.step, "controller": d.controller, "old": finite(d.old), "new": finite(d.new), "reason": d.reason}
        for part in attempt_ranges(run)
        for d in part.visible(Decision.objects.filter(step__gt=since_step)).order_by("step", "id")
    ]
