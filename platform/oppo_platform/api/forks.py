"""New runs from existing ones: with other settings, or from a checkpoint (docs/run-page.md)."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import ConfigDict, Field

from oppo_platform.api.lookups import LARGEST_ID, CheckpointId, RunId, caller, get_run_row
from oppo_platform.api.openapi import problems
from oppo_platform.projects.access import may_submit
from oppo_platform.runs import selectors as runs
from oppo_platform.runs.forks import fork_spec
from oppo_platform.runs.models import Run
from oppo_platform.runs.spec_patch import apply_changes
from oppo_platform.storage.database_disk import require_database_space
from oppo_platform.usecases.check_spec import ClusterView, check_spec
from oppo_platform.usecases.run_plan import submit_planned

LONGEST_NAME, MOST_CHANGES = 120, 200
CHANGES = 'Other values at dotted paths of the spec: `{"overlap.overcommit.max": 8}`; a number is an index into a list.'

router = Router()


class Submitted(Schema):
    """A run that was just submitted."""

    id: int
    url: str
    name: str
    state: str


class CheckpointForkBody(Schema):
    """Other values at dotted paths of the spec, and the new run's name."""

    model_config = ConfigDict(extra="forbid")

    changes: dict[str, Any] = Field(default={}, max_length=MOST_CHANGES, description=CHANGES)
    name: str | None = Field(None, max_length=LONGEST_NAME, description="The new run's name; null: that of the other one.")


class ForkBody(CheckpointForkBody):
    """The same, and the step of the checkpoint to start from; without one it starts at step 0."""

    step: int | None = Field(None, ge=0, description="The step whose checkpoint it begins with; null: without a checkpoint.")


@router.post(
    "runs/{int:run_id}/fork",
    summary="Submit a run with another run's spec",
    response={201: Submitted},
    openapi_extra=problems(507),
)
def fork_run(request: HttpRequest, run_id: RunId, body: ForkBody) -> Any:
    """201 with the queued run, in the same project; 422 with every error, 403 for viewers, 507 while disk space is low."""
    return _forked(request, get_run_row(request, run_id), body, body.step)


@router.post(
    "runs/{int:run_id}/checkpoints/{int:checkpoint_id}/fork",
    summary="Submit a run that starts from a checkpoint",
    response={201: Submitted},
    openapi_extra=problems(507),
)
def fork_checkpoint(request: HttpRequest, run_id: RunId, checkpoint_id: CheckpointId, body: CheckpointForkBody) -> Any:
    """As `fork`, from the step of this checkpoint; of several attempts' checkpoints of that step, from the newer one."""
    run = get_run_row(request, run_id)
    step: int = run.checkpoints.values_list("step", flat=True).get(pk=min(checkpoint_id, LARGEST_ID))
    return _forked(request, run, body, step)


def _forked(request: HttpRequest, run: Run, body: CheckpointForkBody, step: int | None) -> Status:
    user = caller(request)
    if not may_submit(user, run.project):
        raise PermissionDenied(f"Your role in {run.project.team.name} can view runs but not submit them.")
    require_database_space()
    spec = fork_spec(run.spec, run.pk, step)
    spec["name"] = body.name or spec["name"]
    cluster = ClusterView()
    checked = check_spec(data=apply_changes(spec, body.changes), team_id=run.project.team_id, cluster=cluster)
    born = submit_planned(user, run.project, checked, (), cluster)
    return Status(201, {"id": born.pk, "url": runs.run_url(born.pk), "name": born.name, "state": born.state})
