"""A run's timeline: spans, a Plotly figure and a Chrome trace (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Query, Router
from typing_extensions import TypedDict

from oppo_platform.api.lookups import RunId, get_run_row
from oppo_platform.api.openapi import file
from oppo_platform.api.problems import problem
from oppo_platform.telemetry.palette import ThemeName
from oppo_platform.telemetry.timeline_plot import timeline_figure
from oppo_platform.telemetry.timelines import timeline as spans_of_run
from oppo_platform.telemetry.traces import TraceRangeError, trace

router = Router()
FirstStep = Annotated[int | None, Query(description="The first step; by default the newest steps.")]
LastStep = Annotated[int | None, Query(description="The last step; by default the last one there is.")]
Theme = Annotated[ThemeName, Query(description="The figure's colours.")]


class WorstBubble(TypedDict):
    """One of the ten longest idle intervals of a device; seconds."""

    device: str
    cause: str
    step: int
    start_s: float
    length_s: float
    words: str


class Timeline(TypedDict):
    """Steps as spans (docs/interfaces.md); `far`: neighbouring steps are merged."""

    lanes: list[list[str]]
    devices: list[str]
    first_step: int | None
    last_step: int | None
    far: bool
    steps: list[dict[str, Any]]
    worst: list[WorstBubble]


class Figure(TypedDict):
    """A Plotly figure."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


@router.get("runs/{int:run_id}/timeline", summary="Timeline of all devices, in detail or downsampled")
def show_timeline(request: HttpRequest, run_id: RunId, from_step: FirstStep = None, to_step: LastStep = None) -> Timeline:
    """At most 50 recorded steps with every span: the newest, or those from `from_step` on.

    If both ends are given with more than 50 recorded steps between them, `far` is true: adjacent steps are merged until at most
    5,000 spans are left, with `to_step` and the number `merged`. Lengths are then totals per device and phase or cause; positions
    within a merged step have no meaning. `worst` has the ten longest bubbles of the range.
    """
    return spans_of_run(get_run_row(request, run_id), from_step, to_step)


@router.get("runs/{int:run_id}/timeline/figure", summary="The timeline as a Plotly figure")
def show_timeline_figure(
    request: HttpRequest, run_id: RunId, from_step: FirstStep = None, to_step: LastStep = None, theme: Theme = "light"
) -> Figure:
    """The same steps as `timeline`, for `plotly.graph_objects.Figure` and `Plotly.newPlot`: placed end to end, in seconds. Bars
    over all lanes of a device are idle time, hatched by cause."""
    return timeline_figure(spans_of_run(get_run_row(request, run_id), from_step, to_step), theme)


@router.get(
    "runs/{int:run_id}/trace.json",
    summary="Steps as a Chrome trace for ui.perfetto.dev",
    openapi_extra=file("application/json"),
)
def download_trace(
    request: HttpRequest,
    run_id: RunId,
    from_step: Annotated[int, Query(description="The first step.")],
    to_step: Annotated[int, Query(description="The last step.")],
) -> HttpResponse:
    """At most 50 recorded steps, in the format of `oppo trace`."""
    run = get_run_row(request, run_id)
    try:
        drawn = trace(run, from_step, to_step)
    except TraceRangeError as error:
        return problem(422, str(error))
    answer = HttpResponse(drawn, content_type="application/json")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}-steps-{from_step}-{to_step}.trace.json"'
    return answer
