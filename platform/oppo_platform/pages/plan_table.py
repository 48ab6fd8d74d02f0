"""The table of a run's plan and what happened, as texts of the run page."""

from __future__ import annotations

from typing import Any

from oppo_platform.pages.templatetags.oppo_format import NONE, brief, duration, figure, gibibytes, percent, signed
from oppo_platform.runs.models import Run
from oppo_platform.usecases.plan_review import FigureName, PlannedFigure, plan_review

TITLES: dict[FigureName, str] = {
    "wait_s": "Wait for the start",
    "step_s": "Step time",
    "duration_s": "Duration",
    "device_hours": "Device-hours",
    "peak_memory_bytes": "Peak memory of a device",
}
FEW_HOURS = 0.1


def plan_table(run: Run) -> dict[str, Any] | None:
    """Rows of the table, and what the times are based on; None for a run without a plan."""
    review = plan_review(run)
    if review is None:
        return None
    return {"basis": review["plan"]["time"]["text"], "rows": [_row(each, review["plan"]["kind"]) for each in review["figures"]]}


def _row(figures: PlannedFigure, kind: str) -> dict[str, Any]:
    name, planned, actual = figures["name"], figures["planned"], figures["actual"]
    title = "GPU-hours" if name == "device_hours" and kind == "cuda" else TITLES[name]
    return {
        "title": title,
        "planned": _text(name, planned),
        "actual": _text(name, actual),
        "projected": figures["projected"] and actual is not None,
        "deviation": _deviation(figures),
    }


def _text(name: FigureName, value: float | None) -> str:
    if name == "peak_memory_bytes":
        return gibibytes(value)
    if name == "device_hours":  # few as a duration
        return figure(value) if value is None or value >= FEW_HOURS else duration(3600 * value)
    if name == "step_s":
        return brief(value)
    return duration(value)


def _deviation(figures: PlannedFigure) -> str:
    """In percent; of the wait in time, because a share of a wait of seconds means nothing."""
    planned, actual, share = figures["planned"], figures["actual"], figures["deviation"]
    if figures["name"] == "wait_s":
        return NONE if planned is None or actual is None else signed(actual - planned, duration) or "0 s"
    return NONE if share is None else signed(share, lambda size: percent(size, 0)) or "0 %"
