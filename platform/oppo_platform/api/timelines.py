"""A run's timeline over HTTP: as spans, as a Plotly figure and as a Chrome trace (docs/interfaces.md)."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from ninja import Router

from oppo_platform.api.lookups import run_of
from oppo_platform.api.problems import problem
from oppo_platform.telemetry.palette import ThemeName
from oppo_platform.telemetry.timeline_plot import timeline_figure
from oppo_platform.telemetry.timelines import timeline as spans_of_run
from oppo_platform.telemetry.traces import NothingToTrace, trace

router = Router()


@router.get("runs/{int:run_id}/timeline", summary="What every device did, step by step or from afar")
def timeline(request: HttpRequest, run_id: int, from_step: int | None = None, to_step: int | None = None) -> dict[str, Any]:
    """The newest steps, or those from `from_step` on; a range of more than 50 steps is merged."""
    return spans_of_run(run_of(request, run_id), from_step, to_step)


@router.get("runs/{int:run_id}/timeline/figure", summary="The timeline as a Plotly figure")
def figure(
    request: HttpRequest, run_id: int, from_step: int | None = None, to_step: int | None = None, theme: ThemeName = "light"
) -> dict[str, Any]:
    """`{"data", "layout"}` of the same steps as `timeline`, for `plotly.graph_objects.Figure` and `Plotly.newPlot`."""
    return timeline_figure(spans_of_run(run_of(request, run_id), from_step, to_step), theme)


@router.get("runs/{int:run_id}/trace.json", summary="Some steps as a Chrome trace, for ui.perfetto.dev")
def download_trace(request: HttpRequest, run_id: int, from_step: int, to_step: int) -> HttpResponse:
    """At most 50 recorded steps, drawn as by `oppo trace`."""
    run = run_of(request, run_id)
    try:
        drawn = trace(run, from_step, to_step)
    except NothingToTrace as error:
        return problem(422, str(error))
    answer = HttpResponse(drawn, content_type="application/json")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}-steps-{from_step}-{to_step}.trace.json"'
    return answer
