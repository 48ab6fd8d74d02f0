"""The JSON API of browsers and notebooks, `/api/v1/…` (docs/interfaces.md). The live stream is `api.stream`."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from ninja import Query, Schema, Status
from pydantic import ConfigDict, Field

from oppo_contract.spec import RunSpec
from oppo_contract.spec_errors import SpecError, SpecProblem
from oppo_contract.yaml_text import check_size, dump_yaml, parse_yaml
from oppo_platform import clock
from oppo_platform.accounts.access import Action, may, may_submit
from oppo_platform.accounts.models import User
from oppo_platform.api import (
    alerts,
    checkpoints,
    forks,
    history,
    logs,
    run_lists,
    samples,
    saved_views,
    sharing,
    storage,
    teams,
    timelines,
    tokens,
)
from oppo_platform.api.auth import PERSON, READER
from oppo_platform.api.forks import MOST_CHANGES, Submitted
from oppo_platform.api.lookups import LARGEST_ID, chosen_project, person, run_of, steers, summary_of
from oppo_platform.api.openapi import DescribedAPI
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import install, problem
from oppo_platform.api.rendering import FastJson
from oppo_platform.api.request_wrapper import as_usual
from oppo_platform.cursors import BadCursor
from oppo_platform.runs import lifecycle
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.forks import resume_at
from oppo_platform.runs.models import Checkpoint, Project, Run
from oppo_platform.runs.services import check_spec, submit_run
from oppo_platform.runs.spec_patch import changed
from oppo_platform.scheduling.usage import Held, held_by
from oppo_platform.storage.database_disk import DatabaseFull, refuse_without_room
from oppo_platform.storage.trash import NotDeletable
from oppo_platform.telemetry import selectors as telemetry
from oppo_platform.telemetry.comparison import View, compare
from oppo_platform.telemetry.metric_export import raw_metrics
from oppo_platform.telemetry.overlap_savings import Saving, saving

MOST_KEYS = 100
MOST_COMPARED = 100
LAST_STEP = 2**31 - 1

api = DescribedAPI(
    title="OPPO Platform", version="1", auth=PERSON, renderer=FastJson(), docs_url=None, openapi_url=None, urls_namespace="api"
)
install(api)
api.add_decorator(as_usual, mode="view")
for part in (
    run_lists,
    samples,
    timelines,
    logs,
    checkpoints,
    forks,
    history,
    saved_views,
    storage,
    alerts,
    sharing,
    teams,
    tokens,
):
    api.add_router("", part.router)
for refusal in (lifecycle.NotPossible, NotDeletable):
    api.add_exception_handler(refusal, lambda request, error: problem(409, str(error)))
api.add_exception_handler(BadCursor, lambda request, error: problem(422, "The cursor is not the `next` of a page of this list."))
api.add_exception_handler(DatabaseFull, lambda request, error: problem(507, str(error)))


@api.get("openapi.json", include_in_schema=False)
def openapi(request: HttpRequest) -> dict[str, Any]:
    """This API's OpenAPI document."""
    return described()


@cache
def described() -> dict[str, Any]:
    """The document, made once a process."""
    return api.get_openapi_schema()


class SpecBody(Schema):
    """A spec as YAML text or as JSON, other values at dotted paths of it, and the project (id or name) it is meant for."""

    model_config = ConfigDict(extra="forbid")

    yaml: str | None = None
    spec: dict[str, Any] | None = None
    changes: dict[str, Any] = Field(default={}, max_length=MOST_CHANGES)
    project: int | str | None = None

    def checked(self, team_id: int | None) -> RunSpec:
        """The spec with its changes; raises `SpecError`. `team_id` as in `check_spec`."""
        if (self.yaml is None) == (self.spec is None):
            raise SpecError([SpecProblem("", "give either `yaml` or `spec`")])
        given = self.given() if self.changes else None
        if isinstance(given, dict):
            return check_spec(data=changed(given, self.changes), team_id=team_id)
        return check_spec(yaml=self.yaml, data=self.spec, team_id=team_id)

    def given(self) -> Any:
        """What was sent as plain data, without the changes. Raises `SpecError` for what cannot be read, or is too large."""
        if self.spec is not None:
            check_size(self.spec)
            return self.spec
        return None if self.yaml is None else parse_yaml(self.yaml)


class PriorityBody(Schema):
    """Another priority."""

    model_config = ConfigDict(extra="forbid")

    priority: int


class ExtendBody(Schema):
    """More time on devices."""

    model_config = ConfigDict(extra="forbid")

    hours: float


@api.post("runs/validate", auth=READER, summary="Check a spec without submitting it; always 200")
def validate(request: HttpRequest, body: SpecBody) -> dict[str, Any]:
    """`{"ok", "problems", "spec", "yaml"}`: the spec with every default filled in when it is fine, otherwise as it was given."""
    try:
        spec = body.checked(_team_for(person(request), body.project)).model_dump(mode="json")
    except SpecError as error:
        spec, yaml = _as_given(body)
        return {"ok": False, "problems": [p.as_dict() for p in error.problems], "spec": spec, "yaml": yaml}
    return {"ok": True, "problems": [], "spec": spec, "yaml": dump_yaml(spec)}


def _team_for(user: User, wanted: int | str | None) -> int | None:
    """The team whose quota and secrets the spec has to respect; None when the user may not submit there, so may not see them."""
    try:
        project = chosen_project(user, wanted)
    except Project.DoesNotExist:
        return None
    return project.team_id if may(user, Action.NAME_SECRETS, project.team_id) else None


def _as_given(body: SpecBody) -> tuple[dict[str, Any] | None, str | None]:
    """A refused spec in both shapes, so that form and YAML can go on showing one thing; None for what cannot be read."""
    try:
        data = body.given()
        if not isinstance(data, dict):
            return None, body.yaml
        return data, dump_yaml(data) if body.yaml is None else body.yaml
    except SpecError:
        return body.spec, body.yaml


@api.post("runs", summary="Submit a run", response={201: Submitted})
def submit(request: HttpRequest, body: SpecBody) -> Any:
    """201 with the queued run; 422 with every complaint; 403 for viewers; 507 while the database has no room."""
    user = person(request)
    project = chosen_project(user, body.project)
    if not may_submit(user, project):
        raise PermissionDenied(f"You may look at {project.team.name}'s runs, but not submit any.")
    refuse_without_room()
    run = submit_run(user, project, body.checked(project.team_id))
    return Status(201, {"id": run.pk, "url": runs.run_url(run.pk), "name": run.name, "state": run.state})


api.get("runs", summary="Runs of your teams")(run_lists.list_runs)  # here, beside the other method of its address


@api.get("runs/{int:run_id}", summary="One run")
def show(request: HttpRequest, run_id: int) -> runs.RunSummary:
    """The run's summary."""
    return summary_of(request, run_id)


api.delete("runs/{int:run_id}", summary="Delete a run")(storage.delete)  # here, beside the other method of its address


@api.get("runs/{int:run_id}/spec.yaml", summary="A run's spec as YAML")
def spec(request: HttpRequest, run_id: int) -> HttpResponse:
    """Everything that the run was asked to do, defaults included; `POST runs` takes it as it is."""
    run = run_of(request, run_id)
    answer = HttpResponse(runs.spec_yaml(run), content_type="application/yaml; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}.yaml"'
    return answer


@api.post("runs/{int:run_id}/cancel", summary="Cancel a run")
def cancel(request: HttpRequest, run_id: int) -> runs.RunSummary:
    """At once when it waits; otherwise its engine is told by the next heartbeat. A run that has ended stays as it is."""
    lifecycle.cancel_run(run_id, steers(request, run_id))
    return summary_of(request, run_id)


@api.post("runs/{int:run_id}/pause", summary="Pause a run")
def pause(request: HttpRequest, run_id: int) -> runs.RunSummary:
    """At once when it waits; otherwise its engine saves first. 409 once it ends or is being cancelled."""
    lifecycle.pause_run(run_id, steers(request, run_id))
    return summary_of(request, run_id)


@api.post("runs/{int:run_id}/resume", summary="Resume a paused run")
def resume(request: HttpRequest, run_id: int) -> runs.RunSummary:
    """It waits for devices again. 409 when it is neither paused nor pausing, or has used up its time."""
    lifecycle.resume_run(run_id, steers(request, run_id))
    return summary_of(request, run_id)


@api.post("runs/{int:run_id}/checkpoints/{int:checkpoint_id}/resume", summary="Resume a paused run from an older checkpoint")
def resume_from(request: HttpRequest, run_id: int, checkpoint_id: int) -> runs.RunSummary:
    """It waits for devices again. 409 when it is not paused, or the files are gone."""
    actor = steers(request, run_id)
    if checkpoint_id > LARGEST_ID:
        raise Checkpoint.DoesNotExist
    resume_at(run_id, checkpoint_id, actor)
    return summary_of(request, run_id)


@api.post("runs/{int:run_id}/priority", summary="Change a run's priority")
def set_priority(request: HttpRequest, run_id: int, body: PriorityBody) -> runs.RunSummary:
    """1 to 99, higher goes first within the team."""
    lifecycle.set_priority(run_id, body.priority, steers(request, run_id))
    return summary_of(request, run_id)


@api.post("runs/{int:run_id}/extend", summary="Give a run more time on devices")
def extend(request: HttpRequest, run_id: int, body: ExtendBody) -> runs.RunSummary:
    """So many hours more. 409 for a run without a limit."""
    lifecycle.extend_run(run_id, body.hours, steers(request, run_id))
    return summary_of(request, run_id)


@api.get("runs/{int:run_id}/metrics", summary="Series of a run")
def metrics(
    request: HttpRequest,
    run_id: int,
    names: Annotated[str, Query(alias="keys")],
    x: telemetry.Axis = "step",
    max_points: int = 2000,
    since_step: int = 0,
    to_step: int = LAST_STEP,
) -> telemetry.Metrics | Any:
    """`keys` separated by commas; one that ends in `*` stands for all that begin so. Spikes survive thinning."""
    steps = telemetry.Range(max(-1, min(since_step, LAST_STEP)), max(-1, min(to_step, LAST_STEP)))
    return telemetry.metrics(run_of(request, run_id), _keys(names), x, max_points, steps)


@api.get("runs/{int:run_id}/metrics.ndjson", summary="Metrics in full resolution, a step a line")
def download_metrics(
    request: HttpRequest,
    run_id: int,
    names: Annotated[str, Query(alias="keys")],
    since_step: int = 0,
    to_step: int = LAST_STEP,
) -> StreamingHttpResponse:
    """Every point as it was told, with every axis: newline-delimited JSON, however long the run."""
    steps = telemetry.Range(max(-1, min(since_step, LAST_STEP)), max(-1, min(to_step, LAST_STEP)))
    run = run_of(request, run_id)
    answer = StreamingHttpResponse(raw_metrics(run, _keys(names), steps), content_type="application/x-ndjson")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}.ndjson"'
    return answer


@api.get("runs/{int:run_id}/usage", summary="Device-hours of a run")
def usage_of_run(request: HttpRequest, run_id: int) -> Held:
    """How long devices were held for the run, all attempts together, and how many it holds now."""
    return held_by(run_of(request, run_id), clock.now())


@api.get("runs/{int:run_id}/saving", summary="What overlap has saved so far")
def saved_by_overlap(request: HttpRequest, run_id: int) -> Saving:
    """The run's own spans, one stage after another, against what was measured; seconds."""
    return saving(run_of(request, run_id))


@api.get("runs/{int:run_id}/decisions", summary="What the controllers decided, and why")
def decisions(request: HttpRequest, run_id: int, since_step: int = 0, limit: Limit = MOST, cursor: Cursor = "") -> dict[str, Any]:
    """In the order of steps."""
    after = max(-1, min(since_step, LAST_STEP))
    return dict(paged(telemetry.decisions(run_of(request, run_id), after), limit, cursor))


@api.get("compare", summary="Runs side by side, against a baseline")
def compare_runs(
    request: HttpRequest,
    run_ids: Annotated[str, Query(alias="runs")],
    names: Annotated[str, Query(alias="keys")] = "",
    x: telemetry.Axis = "step",
    target: float | None = None,
    max_points: int = 1000,
    baseline: int | None = None,
    group: str = "",
    counted: bool = False,
) -> dict[str, Any] | Any:
    """Curves, time to the target, speed-up by run and group, differing configuration and figures."""
    ids = parse_ids(run_ids)
    if not ids or len(ids) > MOST_COMPARED:
        return problem(422, f"Give 1 to {MOST_COMPARED} run ids, separated by commas.")
    if baseline is not None and baseline not in ids:
        return problem(422, "The baseline must be one of the runs.")
    view = View(target, baseline, group, counted)
    return compare(runs.get_runs(person(request), ids), _keys(names), x, max_points, view)


def parse_ids(text: str) -> list[int]:
    """Run ids from `1,2,3`. Raises `Run.DoesNotExist` for what cannot be an id."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(_may_be_an_id(word) for word in words):
        raise Run.DoesNotExist("No run has such an id.")
    return [int(word) for word in words]


def _may_be_an_id(word: str) -> bool:
    # Its length first: Python refuses to read numbers of thousands of digits.
    return word.isascii() and word.isdigit() and len(word) <= len(str(LARGEST_ID)) and int(word) <= LARGEST_ID


def _keys(text: str) -> list[str]:
    return [key.strip() for key in text.split(",") if key.strip()][:MOST_KEYS]
