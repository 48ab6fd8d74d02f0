"""The timeline of a run, merged over its attempts: every span of a few steps, or any number of steps downsampled.

The caller has checked that the user may see the run. All results are ready for JSON.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from oppo_platform.runs.models import Attempt, Run
from oppo_platform.telemetry.metric_reader import AttemptRange, attempt_ranges
from oppo_platform.telemetry.models import SpanBatch
from oppo_platform.telemetry.timeline_downsampling import (
    DownsampledSteps,
    StoredStep,
    merged_steps,
    unpack_downsampled,
    worst_bubbles,
)

MOST_DETAILED_STEPS = 50


def timeline(run: Run, from_step: int | None = None, to_step: int | None = None) -> dict[str, Any]:
    """Spans of each device, step by step, and the ten longest bubbles of these steps.

    Times are seconds since the run's first `started` event, also in later attempts, so that they share one axis. A range with
    both ends and more than 50 recorded steps is downsampled (`merged_steps`, at most 5,000 spans); otherwise the result is
    every span of at most 50 steps: the first ones from `from_step` on, or the newest.
    """
    started = Attempt.objects.filter(run=run, engine_started_at__isnull=False)
    newest, oldest = started.order_by("-epoch").first(), started.order_by("epoch").first()
    zero = (oldest.engine_started_at if oldest else None) or 0.0
    parts = [(part, visible_spans(part, from_step, to_step)) for part in attempt_ranges(run)]
    is_far = from_step is not None and to_step is not None and to_step - from_step >= MOST_DETAILED_STEPS
    stored = _stored(parts, zero) if is_far else []
    if len(stored) > MOST_DETAILED_STEPS:
        sampled = unpack_downsampled(stored)
        steps = merged_steps(sampled)
    else:
        sampled, steps = _full_detail(parts, zero, from_first=from_step is not None)
    return {
        "lanes": newest.lanes if newest else [],
        "devices": _devices(newest.device_names if newest else [], steps),
        "first_step": sampled.steps[0] if sampled.steps else None,
        "last_step": sampled.steps[-1] if sampled.steps else None,
        "far": len(stored) > MOST_DETAILED_STEPS,
        "steps": steps,
        "worst": worst_bubbles(sampled),
    }


def visible_spans(part: AttemptRange, from_step: int | None, to_step: int | None) -> QuerySet[SpanBatch]:
    """Steps of an attempt that no newer attempt hides, unordered."""
    rows = part.visible(SpanBatch.objects.all())
    if from_step is not None:
        rows = rows.filter(step__gte=from_step)
    return rows if to_step is None else rows.filter(step__lte=to_step)


def _devices(announced: list[str], steps: list[dict[str, Any]]) -> list[str]:
    """Devices of the newest attempt, then those of older attempts with spans in these steps."""
    used = (device for step in steps for device in (*step["device"], *(device for device, *_ in step["idle"])))
    return list(dict.fromkeys([*announced, *used]))


def _shift_s(part: AttemptRange, zero: float) -> float:
    return (part.attempt.engine_started_at or zero) - zero


def _stored(parts: list[tuple[AttemptRange, QuerySet[SpanBatch]]], zero: float) -> list[StoredStep]:
    return [
        StoredStep(step, bytes(packed), _shift_s(part, zero))
        for part, rows in parts
        for step, packed in rows.order_by("step").values_list("step", "far")
    ]


def _full_detail(
    parts: list[tuple[AttemptRange, QuerySet[SpanBatch]]], zero: float, from_first: bool
) -> tuple[DownsampledSteps, list[dict[str, Any]]]:
    """At most 50 steps with every span: the first ones, or the newest."""
    chosen = []
    for part, rows in parts:
        ordered = rows.order_by("step" if from_first else "-step").values_list("step", "far", "data")
        shift = _shift_s(part, zero)
        some = [(StoredStep(step, bytes(sampled), shift), data) for step, sampled, data in ordered[:MOST_DETAILED_STEPS]]
        chosen += some if from_first else some[::-1]
    chosen = chosen[:MOST_DETAILED_STEPS] if from_first else chosen[-MOST_DETAILED_STEPS:]
    return unpack_downsampled([step for step, _ in chosen]), [shifted(data, step.shift_s) for step, data in chosen]


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
