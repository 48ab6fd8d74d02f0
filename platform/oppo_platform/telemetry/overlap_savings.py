"""Time saved by overlap: a run's spans laid end to end, one stage after another as in sequential PPO (docs/metrics.md)."""

from __future__ import annotations

import numpy as np
from django.db.models import QuerySet
from typing_extensions import TypedDict

from oppo_platform.runs.models import Run
from oppo_platform.telemetry.metric_reader import attempt_ranges
from oppo_platform.telemetry.models import SpanBatch
from oppo_platform.telemetry.timeline_downsampling import KINDS, DownsampledSteps, StoredStep, unpack_downsampled
from oppo_platform.telemetry.timelines import visible_spans

MOST_STEPS = 1000
STAGES: tuple[tuple[str, ...], ...] = (
    ("data",),
    ("weights", "actor-prefill"),
    ("decode",),
    ("reward-prefill", "reference-prefill", "critic-prefill", "score", "actor-forward"),
    ("advantages",),
    ("update-actor", "update-critic"),
    ("checkpoint",),
    ("eval",),
)
STAGE_OF = {phase: number for number, phases in enumerate(STAGES) for phase in phases}


class Saving(TypedDict):
    """Seconds of the sampled steps, as measured and one stage after another; `saved_s` is for the whole run so far."""

    steps: int
    measured_s: float
    sequential_s: float
    saved_s: float


def saving(run: Run) -> Saving:
    """Time saved so far, from all recorded steps, or from 1,000 spread evenly over a longer run."""
    steps_by_rows = [
        (rows, step) for part in attempt_ranges(run) for rows in [visible_spans(part, None, None)] for step in _steps(rows)
    ]
    stride = -(-len(steps_by_rows) // MOST_STEPS) or 1
    chosen: dict[int, tuple[QuerySet[SpanBatch], list[int]]] = {}
    for rows, step in steps_by_rows[::stride]:
        chosen.setdefault(id(rows), (rows, []))[1].append(step)
    stored = [
        StoredStep(step, bytes(packed), 0.0)
        for rows, steps in chosen.values()
        for step, packed in rows.filter(step__in=steps).values_list("step", "far")
    ]
    sampled = unpack_downsampled(stored)
    measured, sequential = float((sampled.windows[:, 1] - sampled.windows[:, 0]).sum()), sequential_s(sampled)
    saved = run.elapsed_s * (sequential / measured - 1) if measured > 0 else 0.0
    return Saving(steps=len(stored), measured_s=measured, sequential_s=sequential, saved_s=saved)


def _steps(rows: QuerySet[SpanBatch]) -> list[int]:
    return list(rows.order_by("step").values_list("step", flat=True))


def sequential_s(sampled: DownsampledSteps) -> float:
    """Duration of the steps without overlap: a stage takes as long as its busiest device's work."""
    stage_of = np.array([STAGE_OF.get(name, 0) if role else 0 for role, name in KINDS])
    is_work = np.array([bool(role) for role, _ in KINDS])
    chosen = is_work[sampled.entries["kind"]]
    rows, entries = sampled.rows[chosen], sampled.entries[chosen]
    work = np.zeros((len(sampled.steps), len(STAGES), max(1, len(sampled.devices))))
    np.add.at(work, (rows, stage_of[entries["kind"]], entries["device"]), entries["seconds"])
    return float(work.max(axis=2).sum())
