"""Checkpoints over HTTP: `runs/{id}/checkpoints` (docs/interfaces.md)."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from ninja import Router

from oppo_platform.accounts.access import Action, demand
from oppo_platform.api.problems import problem
from oppo_platform.api.subjects import LARGEST_ID, person, run_of
from oppo_platform.runs.checkpoints import NotReadable, checkpoints, open_archive
from oppo_platform.runs.models import Checkpoint

router = Router()


@router.get("runs/{int:run_id}/checkpoints", summary="Checkpoints of a run")
def list_checkpoints(request: HttpRequest, run_id: int) -> dict[str, Any]:
    """Newest step first; which one the next attempt resumes from, and which can be downloaded."""
    return {"items": checkpoints(run_of(request, run_id))}


@router.get("runs/{int:run_id}/checkpoints/{int:checkpoint_id}/download", summary="A checkpoint as a tar")
def download(request: HttpRequest, run_id: int, checkpoint_id: int) -> HttpResponseBase:
    """Its folder with the manifest. 403 for viewers, 409 when the files are not on the platform's machine."""
    run = run_of(request, run_id)
    demand(person(request), Action.DOWNLOAD, run.project.team_id)
    if checkpoint_id > LARGEST_ID:
        raise Checkpoint.DoesNotExist
    try:
        archive = open_archive(run, checkpoint_id, person(request))
    except NotReadable as error:
        return problem(409, str(error))
    answer = StreamingHttpResponse(archive, content_type="application/x-tar")
    answer.headers["Content-Length"] = str(archive.bytes)
    answer.headers["Content-Disposition"] = f'attachment; filename="{archive.name}"'
    return answer
