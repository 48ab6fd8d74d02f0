"""A run's series, controllers' decisions and device time, and the comparison of runs, over HTTP (docs/interfaces.md)."""

from __future__ import annotations

from typing import Annotated

from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from ninja import Query, Router
from typing_extensions import TypedDict

from oppo_platform import clock
from oppo_platform.api.lookups import LARGEST_ID, RunId, caller, get_run_row
from oppo_platform.api.openapi import file
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import problem
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.models import Run
from oppo_platform.scheduling.usage import DeviceHours, run_device_hours
from oppo_platform.telemetry import selectors as telemetry
from oppo_platform.telemetry.comparison import CompareOptions, UnknownSetting, compare
from oppo_platform.telemetry.grouping import Group
from oppo_platform.telemetry.metric_export import export_metrics
from oppo_platform.telemetry.overlap_savings import OverlapSavings, overlap_savings

MOST_KEYS = 100
MOST_COMPARED = 100
MAX_STEP = 2**31 - 1
KEYS = "Names of metrics (docs/metrics.md), separated by commas"
TARGET = "The reward to reach; by default the first run's `budget.target_reward`."
BASELINE = "The run that others are compared with; by default the first one that is pinned in its project, or else the first one."
GROUP = "A path of the spec by whose value runs are grouped, or `-seed` for all settings but the seed."

router = Router()
SinceStep = Annotated[int, Query(description="Only points after this step.")]
ToStep = Annotated[int, Query(description="The last step.")]
Axis = Annotated[
    telemetry.Axis, Query(description="The axis: steps, seconds of training, trained response tokens, or device-seconds.")
]
MaxPoints = Annotated[
    int,
    Query(
        ge=telemetry.LEAST_POINTS,
        le=telemetry.MOST_POINTS,
        description="Longer series come as this many buckets, each with its mean and its extremes.",
    ),
]
Figures = dict[str, float | None]


class DecisionItem(TypedDict):
    """What a controller decided."""

    id: int
    step: int
    controller: str
    old: float | None
    new: float | None
    reason: str


class Decisions(TypedDict):
    """In the order of steps, a page of them."""

    items: list[DecisionItem]
    next: str | None


class ConfigDifference(TypedDict):
    """A setting in which runs differ, as text by run id."""

    path: str
    values: dict[str, str]


class Comparison(TypedDict):
    """A comparison of runs; keys of the mappings are run ids. `metrics`: names of all metrics that any of the runs has."""

    runs: list[runs.ComparedRun]
    metrics: list[str]
    series: dict[str, dict[str, telemetry.Column]]
    target: float | None
    time_to_target: dict[str, Figures | None]
    baseline: int
    speedup: Figures
    groups: list[Group]
    config_diff: list[ConfigDifference]
    figures: dict[str, Figures]
    counted: dict[str, list[float | None]]


@router.get("runs/{int:run_id}/metrics", summary="Series of a run")
def show_metrics(
    request: HttpRequest,
    run_id: RunId,
    names: Annotated[str, Query(alias="keys", description=f"{KEYS}; one that ends in `*` matches all names with that prefix.")],
    x: Axis = "step",
    max_points: MaxPoints = 2000,
    since_step: SinceStep = 0,
    to_step: ToStep = MAX_STEP,
) -> telemetry.Metrics:
    """Null where not finite. A series of more than `max_points` points is returned in that number of buckets: `step` and `x` are
    the last of a bucket, `y` its mean (null if a point is not finite), and `low` and `high` its extremes."""
    return telemetry.metrics(get_run_row(request, run_id), _keys(names), x, max_points, _range(since_step, to_step))


@router.get(
    "runs/{int:run_id}/metrics.ndjson",
    summary="Metrics in full resolution, one step per line",
    openapi_extra=file("application/x-ndjson"),
)
def download_metrics(
    request: HttpRequest,
    run_id: RunId,
    names: Annotated[str, Query(alias="keys", description=f"{KEYS}.")],
    since_step: SinceStep = 0,
    to_step: ToStep = MAX_STEP,
) -> StreamingHttpResponse:
    """Every recorded point as newline-delimited JSON, streamed: one step per line, ascending, with every axis. A metric without a
    value in a step is missing there; null means not finite. `pandas.read_json(…, lines=True)` and `polars.read_ndjson` read
    it."""
    run = get_run_row(request, run_id)
    points = export_metrics(run, _keys(names), _range(since_step, to_step))
    answer = StreamingHttpResponse(points, content_type="application/x-ndjson")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}.ndjson"'
    return answer


@router.get("runs/{int:run_id}/usage", summary="Device-hours of a run")
def show_usage(request: HttpRequest, run_id: RunId) -> DeviceHours:
    """Device-hours of all attempts, from allocation to release, and the number of devices that the run holds now."""
    return run_device_hours(get_run_row(request, run_id), clock.now())


@router.get("runs/{int:run_id}/saving", summary="Estimated saving vs sequential PPO")
def show_saving(request: HttpRequest, run_id: RunId) -> OverlapSavings:
    """The time saved by overlap, computed from at most 1,000 recorded steps (docs/metrics.md, "Saved by overlap"); seconds."""
    return overlap_savings(get_run_row(request, run_id))


@router.get("runs/{int:run_id}/decisions", summary="Controller decisions with reasons")
def list_decisions(
    request: HttpRequest,
    run_id: RunId,
    since_step: Annotated[int, Query(description="Only decisions after this step.")] = 0,
    limit: Limit = MOST,
    cursor: Cursor = "",
) -> Decisions:
    """In the order of steps."""
    decisions = telemetry.decisions(get_run_row(request, run_id), _step(since_step))
    return Decisions(**paged(decisions, limit, cursor))


@router.get("compare", summary="Compare runs with a baseline")
def compare_runs(
    request: HttpRequest,
    run_ids: Annotated[str, Query(alias="runs", description="Numbers of runs, separated by commas.")],
    names: Annotated[str, Query(alias="keys", description=f"{KEYS}.")] = "",
    x: Axis = "step",
    target: Annotated[float | None, Query(allow_inf_nan=False, description=TARGET)] = None,
    max_points: MaxPoints = 1000,
    baseline: Annotated[int | None, Query(description=BASELINE)] = None,
    group: Annotated[str, Query(description=GROUP)] = "",
    counted: Annotated[bool, Query(description="Also the smoothed reward by which the target counts as reached.")] = False,
) -> Comparison | HttpResponse:
    """Curves, time to the target, speed-up by run and group, differing settings and figures.

    `baseline` defaults to the first compared run that is pinned in its project, or else the first one. `group` is a path of the
    spec, or `-seed` for all differing settings but the seed; the baseline is then its group. With `counted=true`, `counted` holds
    the smoothed reward that decides when the target is reached (docs/comparing.md).
    """
    ids = parse_ids(run_ids)
    if not ids or len(ids) > MOST_COMPARED:
        return problem(422, f"`runs` must be 1 to {MOST_COMPARED} run ids, separated by commas.")
    if baseline is not None and baseline not in ids:
        return problem(422, "The baseline must be one of the compared runs.")
    view = CompareOptions(target, baseline, group, counted)
    try:
        return compare(runs.get_runs(caller(request), ids), _keys(names), x, max_points, view)
    except UnknownSetting as error:
        return problem(422, str(error))


def parse_ids(text: str) -> list[int]:
    """Run ids from `1,2,3`. Raises `Run.DoesNotExist` for what cannot be an id."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(_may_be_an_id(word) for word in words):
        raise Run.DoesNotExist("No run has such an id.")
    return [int(word) for word in words]


def _may_be_an_id(word: str) -> bool:
    # Check the length first: Python refuses to parse numbers of thousands of digits.
    return word.isascii() and word.isdigit() and len(word) <= len(str(LARGEST_ID)) and int(word) <= LARGEST_ID


def _keys(text: str) -> list[str]:
    return [key.strip() for key in text.split(",") if key.strip()][:MOST_KEYS]


def _range(since_step: int, to_step: int) -> telemetry.Range:
    return telemetry.Range(_step(since_step), _step(to_step))


def _step(step: int) -> int:
    return max(-1, min(step, MAX_STEP))
