"""A run's plan beside what happened: step time, duration, device-hours, peak memory, and the wait for its start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from typing_extensions import TypedDict

from oppo_contract.sections.run import Resources
from oppo_contract.states import RunState
from oppo_platform.runs.models import Run
from oppo_platform.runs.selectors import RunSummary, run_summary
from oppo_platform.telemetry.metric_reader import attempt_ranges_by_run
from oppo_platform.usecases.earlier_runs import PEAK_MEMORY, Trained, peak_memory, trained_by, whole_series
from oppo_platform.usecases.run_plan import Plan

FigureName = Literal["wait_s", "step_s", "duration_s", "device_hours", "peak_memory_bytes"]


class PlannedFigure(TypedDict):
    """A planned figure and the actual one; null if unknown. `deviation`: actual ÷ planned − 1. `projected`: to the last step."""

    name: FigureName
    planned: float | None
    actual: float | None
    deviation: float | None
    projected: bool


class PlanReview(TypedDict):
    """The plan at submission, and its figures beside the actual ones."""

    plan: Plan
    figures: list[PlannedFigure]


class RunDetail(RunSummary):
    """A run's summary, its notes (Markdown), and its plan; null for a run that was submitted without one."""

    notes: str
    plan: PlanReview | None


def run_detail(run: Run) -> RunDetail:
    """The detail of a run from `runs.selectors.get_run`."""
    return RunDetail(**run_summary(run), notes=run.notes, plan=plan_review(run))


def plan_review(run: Run) -> PlanReview | None:
    """The run's plan with the actual figures so far; None if it has none."""
    if run.plan is None:
        return None
    ranges = attempt_ranges_by_run([run])
    series = whole_series(ranges, PEAK_MEMORY)
    peak = peak_memory(run.pk, series, Resources.model_validate(run.spec["resources"]).ranks_per_node)
    actual = actual_figures(run, trained_by([run], ranges).get(run.pk), peak)
    return PlanReview(plan=run.plan, figures=compare_plan(run.plan, actual))


def actual_figures(run: Run, trained: Trained | None, peak_bytes: int | None) -> dict[FigureName, tuple[float | None, bool]]:
    """Each actual figure, and whether it is projected to the last step because the run has not succeeded yet."""
    steps = max(0, run.total_steps - (run.forked_step or 0))
    done = run.step - (run.forked_step or 0)
    step_s = trained.elapsed_s / trained.steps if trained else None
    device_s = trained.device_s / trained.steps if trained else 0.0
    ended = run.state == RunState.SUCCEEDED
    count = done if ended else steps
    waited = (run.started_at - run.created_at).total_seconds() if run.started_at else None
    return {
        "wait_s": (waited, False),
        "step_s": (step_s, False),
        "duration_s": (None if step_s is None else count * step_s, not ended),
        "device_hours": (None if step_s is None else count * device_s / 3600, not ended),
        "peak_memory_bytes": (peak_bytes, False),
    }


def compare_plan(plan: Mapping[str, Any], actual: Mapping[FigureName, tuple[float | None, bool]]) -> list[PlannedFigure]:
    """The figures of a stored plan beside the actual ones. Pure."""
    planned = _planned_figures(plan)
    return [
        PlannedFigure(
            name=name, planned=planned[name], actual=value, deviation=deviation(planned[name], value), projected=projected
        )
        for name, (value, projected) in actual.items()
    ]


def _planned_figures(plan: Mapping[str, Any]) -> dict[FigureName, float | None]:
    time, memory, start = plan["time"], plan["memory"], plan["start"]["at"]
    needed = max((device["needed_bytes"] for device in memory["devices"]), default=None)
    wait = None
    if start is not None:
        wait = max(0.0, (datetime.fromisoformat(start) - datetime.fromisoformat(plan["planned_at"])).total_seconds())
    return {
        "wait_s": wait,
        "step_s": time["step_s"],
        "duration_s": time["duration_s"],
        "device_hours": time["device_hours"],
        "peak_memory_bytes": memory["expected_bytes"] or needed,
    }


def deviation(planned: float | None, actual: float | None) -> float | None:
    """Actual ÷ planned − 1; None if one is unknown, or nothing was planned."""
    if not planned or actual is None or not math.isfinite(actual / planned):
        return None
    return actual / planned - 1
