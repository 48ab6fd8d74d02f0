"""Checkpoints over HTTP: `runs/{id}/checkpoints` (docs/interfaces.md)."""

from __future__ import annotations

import re

from django.http import HttpRequest, HttpResponseBase, StreamingHttpResponse
from ninja import Router
from typing_extensions import TypedDict

from oppo_platform.accounts.access import Action, demand
from oppo_platform.api.lookups import LARGEST_ID, CheckpointId, RunId, caller, get_run_row
from oppo_platform.api.openapi import file, problems
from oppo_platform.api.paging import MOST, Cursor, Limit, paged
from oppo_platform.api.problems import problem
from oppo_platform.runs.checkpoints import Archive, Files, NotReadable, checkpoint_describer, open_archive, registered_checkpoints
from oppo_platform.runs.models import Checkpoint

# The only range that resuming a download needs; for others the whole archive is sent, as HTTP allows.
FROM_A_BYTE = re.compile(r"bytes=([0-9]{1,18})-")

ARCHIVE = file("application/x-tar")["responses"][200]
REST = {"description": "The rest, from that byte on.", **ARCHIVE}
RANGES = {
    "parameters": [
        {"in": "header", "name": "Range", "required": False, "schema": {"type": "string", "pattern": "^bytes=[0-9]+-$"},
         "description": "The first byte to send, to resume an interrupted download."},
        {"in": "header", "name": "If-Range", "required": False, "schema": {"type": "string"},
         "description": "The `ETag` of the interrupted download: when it no longer matches, all of the archive is sent."},
    ],
    "responses": {200: ARCHIVE, 206: REST, **problems(403, 409, 416)["responses"]},
}  # fmt: skip

router = Router()


class CheckpointItem(TypedDict):
    """A registered checkpoint."""

    id: int
    step: int
    name: str
    attempt: int
    node: str
    bytes: int
    manifest_sha256: str
    registered_at: str
    files: Files
    resumes: bool


class Checkpoints(TypedDict):
    """Newest step first, a page of them."""

    items: list[CheckpointItem]
    next: str | None


@router.get("runs/{int:run_id}/checkpoints", summary="Checkpoints of a run")
def list_checkpoints(request: HttpRequest, run_id: RunId, limit: Limit = MOST, cursor: Cursor = "") -> Checkpoints:
    """Newest step first. `files` is `here` (the platform can read them), `deleted` or `elsewhere`; `resumes` marks the checkpoint
    from which the next attempt resumes."""
    run = get_run_row(request, run_id)
    return Checkpoints(**paged(registered_checkpoints(run), limit, cursor, checkpoint_describer(run)))


@router.get("runs/{int:run_id}/checkpoints/{int:checkpoint_id}/download", summary="A checkpoint as a tar", openapi_extra=RANGES)
def download_checkpoint(request: HttpRequest, run_id: RunId, checkpoint_id: CheckpointId) -> HttpResponseBase:
    """Its folder with the manifest. 403 for viewers, 409 when the files are not on the platform's machine.

    `Range: bytes=N-`, with the `ETag` of the first reply as `If-Range`, yields the rest of the same archive (206).
    """
    run = get_run_row(request, run_id)
    demand(caller(request), Action.DOWNLOAD, run.project.team_id)
    if checkpoint_id > LARGEST_ID:
        raise Checkpoint.DoesNotExist
    try:
        archive = open_archive(run, checkpoint_id, caller(request))
    except NotReadable as error:
        return problem(409, str(error))
    archive.begin = _first_byte(request, f'"{archive.digest}"')
    if archive.begin < archive.bytes:
        return _sent(archive)
    archive.close()
    answer = problem(416, f"The archive has {archive.bytes:,} bytes.")
    answer.headers["Content-Range"] = f"bytes */{archive.bytes}"
    return answer


def _sent(archive: Archive) -> HttpResponseBase:
    answer = StreamingHttpResponse(archive, content_type="application/x-tar", status=206 if archive.begin else 200)
    answer.headers["Content-Length"] = str(archive.bytes - archive.begin)
    answer.headers["Content-Disposition"] = f'attachment; filename="{archive.name}"'
    answer.headers["Accept-Ranges"] = "bytes"
    answer.headers["ETag"] = f'"{archive.digest}"'
    if archive.begin:
        answer.headers["Content-Range"] = f"bytes {archive.begin}-{archive.bytes - 1}/{archive.bytes}"
    return answer


def _first_byte(request: HttpRequest, tag: str) -> int:
    """First byte to send: 0, unless a range is requested and the archive is unchanged."""
    asked = FROM_A_BYTE.fullmatch(request.headers.get("Range", ""))
    if asked is None or request.headers.get("If-Range", tag) != tag:
        return 0
    return int(asked.group(1))
