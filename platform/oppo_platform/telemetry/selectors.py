"""Reading what attempts told, merged over a run's attempts: the newer one wins from the first step that it recorded.

For pages and the API: `metrics(run, keys, …)`, `timeline(run, …)`, `decisions(run)`, `logs(run, …)`. Answers: `samples`.
The caller has made sure that the user may see the run. Everything returned is ready for JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from django.db.models import Q, QuerySet

from oppo_platform.runs.models import Attempt, Run
from oppo_platform.telemetry.downsample import shown_indices
from oppo_platform.telemetry.ingest import finite
from oppo_platform.telemetry.models import Decision, LogLine, SeriesChunk, SpanBatch, StepAxis
from oppo_platform.telemetry.packing import unpack_steps, unpack_values

Axis = Literal["step", "wall", "tokens", "gpu_seconds"]
AXIS_FIELD = {"wall": "elapsed_s", "tokens": "generated_tokens", "gpu_seconds": "device_seconds"}
MOST_POINTS = 20_000
MOST_TIMELINE_STEPS = 50
MOST_LOG_LINES = 1000


class Series(TypedDict):
    """One metric: three columns of the same length; `y` is None where it is not finite, `x` where it is unknown."""

    step: list[int]
    x: list[float | None]
    y: list[float | None]


class Metrics(TypedDict):
    """Some metrics of a run over one axis."""

    x: Axis
    last_step: int
    series: dict[str, Series]


@dataclass(frozen=True, slots=True)
class Reign:
    """The steps from `first` on and before `before` (None: without end) are told by this attempt."""

    attempt: Attempt
    first: int
    before: int | None


def reigns(run: Run) -> list[Reign]:
    """Which attempt tells which steps, oldest first."""
    found: list[Reign] = []
    before: int | None = None
    for attempt in Attempt.objects.filter(run=run, first_step__isnull=False).order_by("-epoch"):
        first = attempt.first_step or 0
        if before is None or first < before:
            found.append(Reign(attempt, first, before))
            before = first
    return found[::-1]


def metrics(run: Run, keys: Iterable[str], x: Axis = "step", max_points: int = 2000, since_step: int = 0) -> Metrics:
    """Series of a run, each with at most `max_points` points that keep every spike.

    Args:
        keys: metric names; one that ends in `*` stands for all that begin so (`bubble/*`).
        x: the axis: step, training seconds, trained response tokens, or device-seconds.
        since_step: only steps above this one, for a page that has the others already.
    """
    parts = reigns(run)
    wanted = matching(run, keys)
    columns = {key: series_points(parts, key, since_step) for key in wanted}
    axis = axis_values(parts, x, since_step) if x != "step" else {}
    shown = {key: _shown(points, axis, x, min(max_points, MOST_POINTS)) for key, points in columns.items()}
    return Metrics(x=x, last_step=run.step, series=shown)


def matching(run: Run, keys: Iterable[str]) -> list[str]:
    """The keys without repetition, patterns replaced by the run's metrics that match."""
    found: dict[str, None] = {}
    for key in keys:
        if key.endswith("*"):
            found.update(dict.fromkeys(name for name in run.latest if name.startswith(key[:-1])))
        else:
            found[key] = None
    return list(found)


def series_points(parts: Sequence[Reign], key: str, since_step: int = 0) -> dict[int, float]:
    """Step → value of one metric in full resolution, ascending by step."""
    points: dict[int, float] = {}
    for part in parts:
        chunks = SeriesChunk.objects.filter(attempt=part.attempt, key=key, last_step__gt=since_step)
        if part.before is not None:
            chunks = chunks.filter(first_step__lt=part.before)
        for steps, values in chunks.order_by("id").values_list("steps", "values"):
            points.update(zip(unpack_steps(steps), unpack_values(values), strict=True))
        if part.before is not None:
            points = {step: value for step, value in points.items() if step < part.before}
    return {step: points[step] for step in sorted(points) if step > since_step}


def axis_values(parts: Sequence[Reign], x: Axis, since_step: int = 0) -> dict[int, float]:
    """Step → place on the axis."""
    values: dict[int, float] = {}
    for part in parts:
        values.update(_within(StepAxis.objects.filter(step__gt=since_step), part).values_list("step", AXIS_FIELD[x]))
    return values


def _shown(points: dict[int, float], axis: dict[int, float], x: Axis, max_points: int) -> Series:
    steps, values = list(points), list(points.values())
    indices = shown_indices(values, max_points)
    places = [float(steps[i]) if x == "step" else axis.get(steps[i]) for i in indices]
    return Series(step=[steps[i] for i in indices], x=places, y=[finite(values[i]) for i in indices])


def timeline(run: Run, from_step: int | None = None, to_step: int | None = None) -> dict[str, Any]:
    """What each device did, step by step: at most 50 steps, the newest ones unless `from_step` says otherwise.

    Times are seconds since the run's first `started` event, also in later attempts, so that they lie on one line.
    """
    parts = reigns(run)
    rows = [(part.attempt, step, data) for part in parts for step, data in _span_rows(part, from_step, to_step)]
    rows = rows[:MOST_TIMELINE_STEPS] if from_step is not None else rows[-MOST_TIMELINE_STEPS:]
    newest = Attempt.objects.filter(run=run, engine_started_at__isnull=False).order_by("-epoch").first()
    zero = Attempt.objects.filter(run=run, engine_started_at__isnull=False).order_by("epoch").first()
    start = (zero.engine_started_at if zero else 0.0) or 0.0
    return {
        "lanes": newest.lanes if newest else [],
        "devices": newest.device_names if newest else [],
        "first_step": rows[0][1] if rows else None,
        "last_step": rows[-1][1] if rows else None,
        "steps": [shifted(data, (attempt.engine_started_at or start) - start) for attempt, _, data in rows],
    }


def _span_rows(part: Reign, from_step: int | None, to_step: int | None) -> list[tuple[int, dict[str, Any]]]:
    rows = _within(SpanBatch.objects.all(), part)
    if from_step is not None:
        rows = rows.filter(step__gte=from_step)
    if to_step is not None:
        rows = rows.filter(step__lte=to_step)
    ordered = rows.order_by("step" if from_step is not None else "-step").values_list("step", "data")
    return sorted(ordered[:MOST_TIMELINE_STEPS], key=lambda row: row[0])


def shifted(data: dict[str, Any], by_s: float) -> dict[str, Any]:
    """One step's spans, `by_s` seconds later."""

    def later(times: list[float | None]) -> list[float | None]:
        return [None if time is None else time + by_s for time in times]

    if by_s == 0:
        return data
    return {
        **data,
        "window_s": later(data["window_s"]),
        "start_s": later(data["start_s"]),
        "end_s": later(data["end_s"]),
        "idle": [[device, cause, *later(times)] for device, cause, *times in data["idle"]],
        "counters": {
            name: [[*later([time]), value] for time, value in samples] for name, samples in data.get("counters", {}).items()
        },
        "deferred": [
            dict(d, **dict(zip(("start_s", "end_s"), later([d["start_s"], d["end_s"]]), strict=True))) for d in data["deferred"]
        ],
    }


def decisions(run: Run) -> list[dict[str, Any]]:
    """What the controllers decided, in the order of steps."""
    return [
        {"step": d.step, "controller": d.controller, "old": finite(d.old), "new": finite(d.new), "reason": d.reason}
        for part in reigns(run)
        for d in _within(Decision.objects.all(), part).order_by("step", "id")
    ]


def logs(run: Run, after: int = 0) -> dict[str, Any]:
    """Log lines of all attempts in the order of their arrival; `next` is the `after` of the following call.

    Without `after` the last thousand lines, with it the next thousand.
    """
    lines = LogLine.objects.filter(attempt__run=run)
    if after:
        found = list(lines.filter(pk__gt=after).order_by("pk")[:MOST_LOG_LINES])
    else:
        found = list(lines.order_by("-pk")[:MOST_LOG_LINES])[::-1]
    told = [{"stream": line.stream, "text": line.text, "time": line.time.isoformat()} for line in found]
    return {"lines": told, "next": found[-1].pk if found else after}


def _within(rows: QuerySet[Any], part: Reign) -> QuerySet[Any]:
    """The rows of an attempt that no newer attempt hides."""
    inside = Q(attempt=part.attempt)
    if part.before is not None:
        inside &= Q(step__lt=part.before)
    return rows.filter(inside)
