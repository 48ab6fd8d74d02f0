"""Time saved by overlap: a run's spans laid end to end, one stage after another as in sequential PPO (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import TypedDict

from oppo_platform.runs.models import Run
from oppo_platform.telemetry.metric_reader import AttemptRange, attempt_ranges
from oppo_platform.telemetry.models import SpanBatch
from oppo_platform.telemetry.timeline_downsampling import KINDS, DownsampledSteps, StoredStep, unpack_downsampled

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


class OverlapSavings(TypedDict):
    """Seconds of the sampled steps, as measured and one stage after another; `saved_s` is for the whole run so far."""

    steps: int
    measured_s: float
    sequential_s: float
    saved_s: float


def overlap_savings(run: Run, most_steps: int = MOST_STEPS, ranges: Sequence[AttemptRange] | None = None) -> OverlapSavings:
    """Time saved so far, from all recorded steps, or from at most `most_steps` spread evenly over a longer run.

    `ranges`: the run's `attempt_ranges`, if known.
    """
    ids: list[int] = []
    for part in attempt_ranges(run) if ranges is None else ranges:
        ids += part.visible(SpanBatch.objects.order_by("step")).values_list("pk", flat=True)
    sampled_ids = ids[:: -(-len(ids) // most_steps) or 1]
    rows = SpanBatch.objects.filter(pk__in=sampled_ids).values_list("step", "far")
    stored = [StoredStep(step, bytes(packed), 0.0) for step, packed in rows]
    sampled = unpack_downsampled(stored)
    measured, sequential = float((sampled.windows[:, 1] - sampled.windows[:, 0]).sum()), sequential_s(sampled)
    saved = run.elapsed_s * (sequential / measured - 1) if measured > 0 else 0.0
    return OverlapSavings(steps=len(stored), measured_s=measured, sequential_s=sequential, saved_s=saved)


def sequential_s(sampled: DownsampledSteps) -> float:
    """Duration of the steps without overlap: a stage takes as long as its busiest device's work.

    On CPU cores all of them work on a stage, except in decoding, which gains little from a second one.
    """
    stage_of = np.array([STAGE_OF.get(name, 0) if role else 0 for role, name in KINDS])
    is_work = np.array([bool(role) for role, _ in KINDS])
    chosen = is_work[sampled.entries["kind"]]
    rows, entries = sampled.rows[chosen], sampled.entries[chosen]
    work = np.zeros((len(sampled.steps), len(STAGES), max(1, len(sampled.devices))))
    np.add.at(work, (rows, stage_of[entries["kind"]], entries["device"]), entries["seconds"])
    longest = work.max(axis=2)
    if sampled.devices and all(name.split("/")[-1].startswith("cpu:") for name in sampled.devices):
        others = [number for number in range(len(STAGES)) if number != STAGE_OF["decode"]]
        longest[:, others] = work.mean(axis=2)[:, others]
    return float(longest.sum())
