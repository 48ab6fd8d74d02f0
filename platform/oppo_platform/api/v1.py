"""The JSON API of browsers and notebooks, `/api/v1/…` (docs/interfaces.md): its routers, and the operations of a run.

The live stream is `api.stream`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from ninja import Schema, Status
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from oppo_contract.spec import RunSpec
from oppo_contract.spec_errors import SpecError, SpecProblem, nearest_match
from oppo_contract.yaml_text import check_size, dump_yaml, parse_yaml
from oppo_platform.accounts.access import Action, may
from oppo_platform.accounts.models import User
from oppo_platform.api import (
    alerts,
    chart_layouts,
    checkpoints,
    forks,
    history,
    logs,
    metrics,
    run_lists,
    sample_comparison,
    samples,
    saved_views,
    sharing,
    storage,
    teams,
    timelines,
    tokens,
)
from oppo_platform.api.auth import PERSON, READER
from oppo_platform.api.forks import CHANGES, MOST_CHANGES, Submitted
from oppo_platform.api.lookups import (
    LARGEST_ID,
    CheckpointId,
    RunId,
    caller,
    chosen_project,
    get_full_run,
    get_run_row,
    get_run_summary,
    managing_actor,
)
from oppo_platform.api.openapi import DescribedAPI, DescribedAsSpec, file, problems
from oppo_platform.api.problems import SpecComplaint, install, problem
from oppo_platform.api.rendering import FastJson
from oppo_platform.api.request_wrapper import api_operation
from oppo_platform.cursors import BadCursor
from oppo_platform.projects.access import may_submit, visible_projects
from oppo_platform.projects.models import Project
from oppo_platform.runs import lifecycle
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.forks import resume_at
from oppo_platform.runs.labels import MOST_TAGS, TagRefused
from oppo_platform.runs.models import PRIORITIES, Checkpoint
from oppo_platform.runs.retry import retry_run
from oppo_platform.runs.spec_patch import apply_changes
from oppo_platform.runs.spec_python import spec_python
from oppo_platform.storage.database_disk import DatabaseFull, require_database_space
from oppo_platform.storage.trash import DeletionRefused
from oppo_platform.telemetry.sample_columns import TooManyColumns
from oppo_platform.usecases.check_spec import ClusterView, check_spec, chosen_values
from oppo_platform.usecases.plan_review import RunDetail, run_detail
from oppo_platform.usecases.run_plan import Plan, plan_run, submit_planned

api = DescribedAPI(
    title="OPPO Platform", version="1", auth=PERSON, renderer=FastJson(), docs_url=None, openapi_url=None, urls_namespace="api"
)
install(api)
api.add_decorator(api_operation, mode="view")
for part in (
    metrics,
    run_lists,
    samples,
    sample_comparison,
    timelines,
    logs,
    checkpoints,
    forks,
    history,
    saved_views,
    chart_layouts,
    storage,
    alerts,
    sharing,
    teams,
    tokens,
):
    api.add_router("", part.router)
for refusal in (lifecycle.NotPossible, DeletionRefused):
    api.add_exception_handler(refusal, lambda request, error: problem(409, str(error)))
api.add_exception_handler(BadCursor, lambda request, error: problem(422, "`cursor` must be the `next` of a page of this list."))
api.add_exception_handler(TooManyColumns, lambda request, error: problem(422, sample_comparison.TOO_MANY))
api.add_exception_handler(DatabaseFull, lambda request, error: problem(507, str(error)))


@api.get("openapi.json", include_in_schema=False)
def openapi(request: HttpRequest) -> dict[str, Any]:
    """This API's OpenAPI document."""
    return described()


@cache
def described() -> dict[str, Any]:
    """The document, built once per process."""
    return api.get_openapi_schema()


class SpecBody(Schema):
    """A spec as YAML text or as JSON, changes at dotted paths, and the project (id or name)."""

    model_config = ConfigDict(extra="forbid")

    yaml: str | None = Field(None, description="The spec as YAML text; give either this or `spec`.")
    spec: Annotated[dict[str, Any], DescribedAsSpec] | None = Field(
        None, description="The spec as JSON; give either this or `yaml`."
    )
    changes: dict[str, Any] = Field(default={}, max_length=MOST_CHANGES, description=CHANGES)
    project: int | str | None = Field(None, description="The run's project, by name or number; null: the first of yours.")

    def checked(self, team_id: int | None, cluster: ClusterView) -> RunSpec:
        """The spec with its changes; raises `SpecError`. Arguments as of `check_spec`."""
        if (self.yaml is None) == (self.spec is None):
            raise SpecError([SpecProblem("", "give either `yaml` or `spec`")])
        given = self.given() if self.changes else None
        if isinstance(given, dict):
            return check_spec(data=apply_changes(given, self.changes), team_id=team_id, cluster=cluster)
        return check_spec(yaml=self.yaml, data=self.spec, team_id=team_id, cluster=cluster)

    def given(self) -> Any:
        """The request's spec as plain data, without the changes. Raises `SpecError` if it is unreadable or too large."""
        if self.spec is not None:
            check_size(self.spec)
            return self.spec
        return None if self.yaml is None else parse_yaml(self.yaml)


class SubmitBody(SpecBody):
    """A spec, and the tags of its run."""

    tags: list[str] = Field(default=[], max_length=MOST_TAGS, description="Tags of the run, which can be changed later.")


class PriorityBody(Schema):
    """A priority."""

    model_config = ConfigDict(extra="forbid")

    priority: int = Field(ge=PRIORITIES[0], le=PRIORITIES[1], description="Higher goes first.")


class ExtendBody(Schema):
    """More hours on devices."""

    model_config = ConfigDict(extra="forbid")

    hours: float = Field(gt=0, le=lifecycle.LONGEST_EXTENSION_H, description="How many more hours on devices.")


class ChosenValue(TypedDict):
    """The value that a run uses for an empty setting, and why."""

    value: float
    reason: str


class Validated(TypedDict):
    """A checked spec: with every default if it is valid, otherwise as sent.

    `chosen`: values of empty settings, by path; `plan`: memory, time and start of the run, null for an invalid spec.
    """

    ok: bool
    problems: list[SpecComplaint]
    spec: dict[str, Any] | None
    yaml: str | None
    chosen: dict[str, ChosenValue]
    plan: Plan | None


@api.post("runs/validate", auth=READER, summary="Check a spec without submitting it; always 200")
def validate_spec(request: HttpRequest, body: SpecBody) -> Validated:
    """`{"ok", "problems", "spec", "yaml", "chosen", "plan"}`: the spec with every default if it is valid, otherwise as sent.

    `plan`: memory of each device, duration, start, and what overlap saves (docs/planning.md).
    """
    user = caller(request)
    try:
        project = chosen_project(user, body.project)
        unknown = []
    except Project.DoesNotExist:
        project, unknown = None, [_unknown_project(user, body.project)]
    cluster = ClusterView()
    # Only who may submit there may see the team's quota and the names of its secrets.
    team_id = project.team_id if project is not None and may(user, Action.NAME_SECRETS, project.team_id) else None
    try:
        checked = body.checked(team_id, cluster)
    except SpecError as error:
        spec, yaml = _as_given(body)
        problems = [p.as_dict() for p in (*unknown, *error.problems)]
        return Validated(ok=False, problems=problems, spec=spec, yaml=yaml, chosen={}, plan=None)
    spec = checked.model_dump(mode="json")
    values = chosen_values(checked, cluster.offers)
    chosen = {path: ChosenValue(value=one.value, reason=one.reason) for path, one in values.items()}
    return Validated(
        ok=not unknown,
        problems=[p.as_dict() for p in unknown],
        spec=spec,
        yaml=dump_yaml(spec),
        chosen=chosen,
        plan=plan_run(checked, values, cluster, team_id),
    )


def _unknown_project(user: User, requested: int | str | None) -> SpecProblem:
    """The problem of a project that does not exist for the user."""
    names = list(visible_projects(user).values_list("name", flat=True)[:20])
    if requested is None:
        return SpecProblem("project", "you have no project yet: ask an owner of your team to add you")
    near = nearest_match(str(requested), names)
    return SpecProblem(
        "project", "is none of your projects", str(requested), f"one of {', '.join(names)}" if names else None, near
    )


def _as_given(body: SpecBody) -> tuple[dict[str, Any] | None, str | None]:
    """A refused spec as YAML and as data, so that form and YAML stay in step; None for an unreadable one."""
    try:
        data = body.given()
        if not isinstance(data, dict):
            return None, body.yaml
        return data, dump_yaml(data) if body.yaml is None else body.yaml
    except SpecError:
        return body.spec, body.yaml


@api.post("runs", summary="Submit a run", response={201: Submitted}, operation_id="submit_run", openapi_extra=problems(507))
def submit(request: HttpRequest, body: SubmitBody) -> Any:
    """201 with the queued run; 422 with every problem; 403 for viewers; 507 while the database's disk is full."""
    user = caller(request)
    project = chosen_project(user, body.project)
    if not may_submit(user, project):
        raise PermissionDenied(f"Your role in {project.team.name} can view runs but not submit them.")
    require_database_space()
    cluster = ClusterView()
    try:
        run = submit_planned(user, project, body.checked(project.team_id, cluster), body.tags, cluster)
    except TagRefused as error:
        return problem(422, str(error))
    return Status(201, {"id": run.pk, "url": runs.run_url(run.pk), "name": run.name, "state": run.state})


# Listing and deleting are defined elsewhere and registered here: ninja needs all methods of a URL on one router.
api.get("runs", summary="Runs of your teams")(run_lists.list_runs)


@api.get("runs/{int:run_id}", summary="One run")
def show_run(request: HttpRequest, run_id: RunId) -> RunDetail:
    """The run's summary, and its plan with what happened."""
    return run_detail(get_full_run(request, run_id))


api.delete("runs/{int:run_id}", summary="Delete a run", operation_id="delete_run")(storage.delete)


@api.get("runs/{int:run_id}/spec.yaml", summary="A run's spec as YAML", openapi_extra=file("application/yaml"))
def download_spec(request: HttpRequest, run_id: RunId) -> HttpResponse:
    """The complete spec, defaults included; `POST runs` accepts it unchanged."""
    run = get_run_row(request, run_id)
    answer = HttpResponse(runs.spec_yaml(run), content_type="application/yaml; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}.yaml"'
    return answer


@api.get("runs/{int:run_id}/spec.py", summary="A Python snippet that submits a run's spec", openapi_extra=file("text/x-python"))
def download_snippet(request: HttpRequest, run_id: RunId) -> HttpResponse:
    """Source for the notebook client; running it queues a run with the same spec in the same project."""
    run = get_run_row(request, run_id)
    answer = HttpResponse(spec_python(run), content_type="text/x-python; charset=utf-8")
    answer.headers["Content-Disposition"] = f'attachment; filename="run-{run.pk}.py"'
    return answer


@api.post("runs/{int:run_id}/cancel", summary="Cancel a run")
def cancel_run(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """A waiting run ends at once; a running engine is stopped with the next heartbeat. Idempotent for ended runs."""
    lifecycle.cancel_run(run_id, managing_actor(request, run_id))
    return get_run_summary(request, run_id)


@api.post("runs/{int:run_id}/pause", summary="Pause a run")
def pause_run(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """A waiting run pauses at once; a running engine saves a checkpoint first. 409 once it ends or is being cancelled."""
    lifecycle.pause_run(run_id, managing_actor(request, run_id))
    return get_run_summary(request, run_id)


@api.post("runs/{int:run_id}/resume", summary="Resume a paused run")
def resume_run(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """The run is queued again. 409 if it is neither paused nor pausing, or has reached its time limit."""
    lifecycle.resume_run(run_id, managing_actor(request, run_id))
    return get_run_summary(request, run_id)


@api.post("runs/{int:run_id}/retry", summary="Retry a failed run from its last checkpoint")
def retry_failed_run(request: HttpRequest, run_id: RunId) -> runs.RunSummary:
    """The same run is queued again, from the start without a checkpoint; earlier failures do not count. 409 if not failed."""
    retry_run(run_id, managing_actor(request, run_id))
    return get_run_summary(request, run_id)


@api.post("runs/{int:run_id}/checkpoints/{int:checkpoint_id}/resume", summary="Resume a paused run from an older checkpoint")
def resume_run_at(request: HttpRequest, run_id: RunId, checkpoint_id: CheckpointId) -> runs.RunSummary:
    """The run is queued again. 409 if it is not paused, or the files are gone."""
    actor = managing_actor(request, run_id)
    if checkpoint_id > LARGEST_ID:
        raise Checkpoint.DoesNotExist
    resume_at(run_id, checkpoint_id, actor)
    return get_run_summary(request, run_id)


@api.post("runs/{int:run_id}/priority", summary="Change a run's priority")
def set_priority(request: HttpRequest, run_id: RunId, body: PriorityBody) -> runs.RunSummary:
    """1 to 99; higher goes first within the team."""
    lifecycle.set_priority(run_id, body.priority, managing_actor(request, run_id))
    return get_run_summary(request, run_id)


@api.post("runs/{int:run_id}/extend", summary="Extend the time limit of a run")
def extend_run(request: HttpRequest, run_id: RunId, body: ExtendBody) -> runs.RunSummary:
    """Adds hours to the limit. 409 for a run without a limit."""
    lifecycle.extend_run(run_id, body.hours, managing_actor(request, run_id))
    return get_run_summary(request, run_id)
