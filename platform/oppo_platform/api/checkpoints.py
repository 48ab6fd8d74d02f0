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

BYTE_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?")

ARCHIVE = file("application/x-tar")["responses"][200]
REST = {"description": "That part of the archive.", **ARCHIVE}
RANGES = {
    "parameters": [
        {"in": "header", "name": "Range", "required": False, "schema": {"type": "string", "pattern": "^bytes=[0-9]+-[0-9]*$"},
         "description": "The first byte to send, and the last one if not to the end, to resume an interrupted download."},
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


class CheckpointList(TypedDict):
    """Newest step first, a page of them."""

    items: list[CheckpointItem]
    next: str | None


@router.get("runs/{int:run_id}/checkpoints", summary="Checkpoints of a run")
def list_checkpoints(request: HttpRequest, run_id: RunId, limit: Limit = MOST, cursor: Cursor = "") -> CheckpointList:
    """Newest step first. `files` is `here` (the platform can read them), `deleted` or `elsewhere`; `resumes` marks the checkpoint
    from which the next attempt resumes."""
    run = get_run_row(request, run_id)
    return CheckpointList(**paged(registered_checkpoints(run), limit, cursor, checkpoint_describer(run)))


@router.get("runs/{int:run_id}/checkpoints/{int:checkpoint_id}/download", summary="A checkpoint as a tar", openapi_extra=RANGES)
def download_checkpoint(request: HttpRequest, run_id: RunId, checkpoint_id: CheckpointId) -> HttpResponseBase:
    """Its folder with the manifest. 403 for viewers, 409 when the files are not on the platform's machine.

    `Range: bytes=N-` or `bytes=N-M`, with the `ETag` of the first reply as `If-Range`, yields that part of the archive (206).
    """
    run = get_run_row(request, run_id)
    demand(caller(request), Action.DOWNLOAD, run.project.team_id)
    if checkpoint_id > LARGEST_ID:
        raise Checkpoint.DoesNotExist
    try:
        archive = open_archive(run, checkpoint_id, caller(request))
    except NotReadable as error:
        return problem(409, str(error))
    archive.begin, archive.end = _requested_bytes(request, f'"{archive.digest}"', archive.bytes)
    if archive.begin < archive.end:
        return _sent(archive)
    archive.close()
    answer = problem(416, f"The archive has {archive.bytes:,} bytes.")
    answer.headers["Content-Range"] = f"bytes */{archive.bytes}"
    return answer


def _sent(archive: Archive) -> HttpResponseBase:
    length = archive.end - archive.begin
    answer = StreamingHttpResponse(archive, content_type="application/x-tar", status=206 if length < archive.bytes else 200)
    answer.headers["Content-Length"] = str(length)
    answer.headers["Content-Disposition"] = f'attachment; filename="{archive.name}"'
    answer.headers["Accept-Ranges"] = "bytes"
    answer.headers["ETag"] = f'"{archive.digest}"'
    if length < archive.bytes:
        answer.headers["Content-Range"] = f"bytes {archive.begin}-{archive.end - 1}/{archive.bytes}"
    return answer


def _requested_bytes(request: HttpRequest, tag: str, size: int) -> tuple[int, int]:
    """First byte to send and the one after the last: all, unless a range is requested and the archive is unchanged.

    Several ranges, or the last N bytes, are not supported: HTTP lets a server send everything then.
    """
    asked = BYTE_RANGE.fullmatch(request.headers.get("Range", ""))
    if asked is None or request.headers.get("If-Range", tag) != tag:
        return 0, size
    begin, last = int(asked[1]), int(asked[2]) if asked[2] else size - 1
    return (0, size) if last < begin and asked[2] else (begin, min(last + 1, size))
