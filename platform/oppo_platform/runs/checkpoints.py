"""A run's checkpoints for pages and API, and their files as one archive.

The platform reads the artifact store only if it is a folder of this machine; otherwise a checkpoint is only listed. It only opens
regular files inside the run's own folder, with the size given in the manifest, whose digest is registered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import stat
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from django.db import transaction

from oppo_platform.accounts import audit
from oppo_platform.accounts.models import User
from oppo_platform.clock import iso
from oppo_platform.runs.attempts import artifact_url, latest_checkpoint
from oppo_platform.runs.models import Checkpoint, Run
from oppo_platform.runs.resume_sources import folder_name

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 16 * 1024 * 1024
READ_BYTES = 1024 * 1024
BLOCK = tarfile.BLOCKSIZE

# A worker's folder name becomes a file name and a header, so its characters are restricted.
_ODD = re.compile(r"[^A-Za-z0-9._-]")

Files = Literal["here", "deleted", "elsewhere"]


class NotReadable(Exception):
    """The checkpoint's files are not on this machine, or differ from the registered ones; the message says which."""


def describe_checkpoints(run: Run) -> list[dict[str, Any]]:
    """Every registered checkpoint by `checkpoint_describer`, newest step first."""
    return list(map(checkpoint_describer(run), registered_checkpoints(run)))


def registered_checkpoints(run: Run) -> list[Checkpoint]:
    """Rows of the run's checkpoints, newest step first."""
    return list(Checkpoint.objects.filter(run=run).select_related("attempt__node").order_by("-step", "-id"))


def checkpoint_describer(run: Run) -> Callable[[Checkpoint], dict[str, Any]]:
    """A function that describes a checkpoint of the run after checking its files.

    `{id, step, name, attempt, node, bytes, manifest_sha256, registered_at, files, resumes}`: `files`: whether they are readable
    here; `resumes`: whether the next attempt would start from it; false for all once the run has ended.
    """
    newest = latest_checkpoint(run) if run.ended_at is None else None

    def describe(row: Checkpoint) -> dict[str, Any]:
        return {
            "id": row.pk,
            "step": row.step,
            "name": folder_name(row),
            "attempt": row.attempt.epoch,
            "node": row.attempt.node.name,
            "bytes": row.bytes,
            "manifest_sha256": row.manifest_sha256,
            "registered_at": iso(row.registered_at),
            "files": files_readable(row),
            "resumes": newest is not None and row.pk == newest.pk,
        }

    return describe


def files_readable(row: Checkpoint) -> Files:
    """Whether its files are readable here. If the run's other checkpoints are, a missing one was deleted."""
    try:
        folder = local_folder(row)
    except NotReadable:
        return "elsewhere"
    if os.access(folder / MANIFEST, os.R_OK):
        return "here"
    hidden = os.path.lexists(folder / MANIFEST) or not os.access(folder.parent, os.R_OK | os.X_OK)
    return "elsewhere" if hidden else "deleted"


def newer_beside(row: Checkpoint) -> bool:
    """Whether a newer checkpoint, registered or not, is readable in the same folder. Raises NotReadable as `local_folder`."""
    folder = local_folder(row)
    return any(other.parent.name > folder.name for other in folder.parent.glob(f"step-*/{MANIFEST}"))


def local_folder(row: Checkpoint) -> Path:
    """Its folder, links resolved. Raises NotReadable when that is not inside the run's own folder on this machine."""
    root, folder = (_path(url) for url in (artifact_url(row.run_id), row.url))
    if not folder.is_relative_to(root) or folder == root:
        raise NotReadable("This checkpoint is not in its run's folder.")
    return folder


def _path(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path.is_absolute() or "\0" in str(path):
        raise NotReadable("The platform can only read checkpoints on its own machine.")
    return path.resolve()


@dataclass(frozen=True, slots=True)
class Member:
    """One file of an archive: its header, its open descriptor, its size in bytes."""

    header: bytes
    descriptor: int
    size: int


class Archive:
    """A checkpoint as a tar stream. Its files are open from the start, so that a concurrent deletion cannot truncate it.

    The same checkpoint gives the same bytes, so an interrupted download can resume: bytes `begin` to `end` - 1 are sent, by
    default all. `digest`: SHA-256 of its manifest, in hexadecimal.
    """

    def __init__(self, name: str, digest: str, members: list[Member], files: ExitStack) -> None:
        self.name, self.digest, self._members, self._files = name, digest, members, files
        self.bytes = sum(len(m.header) + m.size + -m.size % BLOCK for m in members) + 2 * BLOCK
        self.begin, self.end = 0, self.bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self.end - self.begin
        async for piece in self._from_begin():
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return

    async def _from_begin(self) -> AsyncIterator[bytes]:
        skip = self.begin
        for member in self._members:
            async for piece in self._sent(member, skip):
                yield piece
            skip = max(0, skip - len(member.header) - member.size - -member.size % BLOCK)
        yield b"\0" * (2 * BLOCK - skip)

    async def _sent(self, member: Member, skip: int) -> AsyncIterator[bytes]:
        """One member without its first `skip` bytes: its header, its content, and zeros up to a whole block."""
        yield member.header[skip:]
        at = min(max(0, skip - len(member.header)), member.size)
        while at < member.size:
            piece = await asyncio.to_thread(os.pread, member.descriptor, min(member.size - at, READ_BYTES), at)
            if not piece:
                raise OSError(f"a file of {self.name} was truncated during the download")
            at += len(piece)
            yield piece
        yield b"\0" * max(0, -member.size % BLOCK - max(0, skip - len(member.header) - member.size))

    def close(self) -> None:
        """Close the files; the response calls it in any case."""
        self._files.close()


@transaction.atomic
def open_archive(run: Run, checkpoint_id: int, user: User) -> Archive:
    """Open the files of a checkpoint for `user`, with an entry in the audit log.

    Raises:
        Checkpoint.DoesNotExist: it is not one of the run's.
        NotReadable: its files are not here, or differ from the registered ones.
    """
    row = Checkpoint.objects.get(pk=checkpoint_id, run=run)
    audit.record(run.project.team_id, user, "checkpoint.download", f"run {run.pk} {run.name}", step=row.step)
    name = _ODD.sub("_", folder_name(row))
    with ExitStack() as files:
        members = [_member(name, *file, row) for file in open_files(row, files)]
        return Archive(f"run-{run.pk}-{name}.tar", row.manifest_sha256, members, files.pop_all())


def open_files(row: Checkpoint, files: ExitStack) -> list[tuple[str, int, int]]:
    """(path in its folder, descriptor, bytes) of every file, its manifest first; `files` closes them.

    Raises:
        NotReadable: its files are not here, or differ from the registered ones.
    """
    if files_readable(row) != "here":
        raise NotReadable("The files of this checkpoint are not on the platform's machine.")
    folder = local_folder(row)
    return [(path, _opened(folder, path, size, files), size) for path, size in _listed(folder, row)]


def _listed(folder: Path, row: Checkpoint) -> list[tuple[str, int]]:
    """(path in the folder, bytes) of every file in the registered manifest."""
    content = _manifest(folder / MANIFEST)
    if hashlib.sha256(content).hexdigest() != row.manifest_sha256:
        raise NotReadable("The manifest of this checkpoint differs from the registered one: the files were changed.")
    try:
        entries = [(str(path), int(entry["bytes"])) for path, entry in json.loads(content).items()]
        "".join(path for path, _ in entries).encode()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise NotReadable("The manifest of this checkpoint has an unknown format.") from error
    return [(MANIFEST, len(content)), *sorted(entries)]


def _manifest(place: Path) -> bytes:
    """Its content. Raises NotReadable when it is no regular file or is being deleted."""
    odd = "The manifest of this checkpoint is not a regular file, or is too large."
    try:
        # Non-blocking: opening a pipe would wait.
        with open(place, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_MANIFEST:
                raise NotReadable(odd)
            return file.read()
    except OSError as error:
        raise NotReadable(odd) from error


def _member(name: str, path: str, descriptor: int, size: int, row: Checkpoint) -> Member:
    header = tarfile.TarInfo(f"{name}/{path}")
    header.size, header.mtime, header.mode = size, int(row.registered_at.timestamp()), 0o644
    return Member(header.tobuf(tarfile.PAX_FORMAT), descriptor, size)


def _opened(folder: Path, path: str, size: int, files: ExitStack) -> int:
    """Open one file of the manifest. Raises NotReadable for anything but a regular file of that size inside the folder."""
    relative = PurePosixPath(path)
    if relative.is_absolute() or ".." in relative.parts or "\0" in path or not relative.parts:
        raise NotReadable(f"The manifest names {path!r}, which is not a file of the checkpoint.")
    place, problem = folder / relative, f"The file {path!r} of this checkpoint is missing or differs from the registered one."
    if place.resolve() != place or not os.path.isfile(place):
        raise NotReadable(problem)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise NotReadable(problem) from error
    files.callback(os.close, descriptor)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise NotReadable(problem)
    return descriptor
