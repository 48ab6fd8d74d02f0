"""Checkpoint downloads: resumable, verified against the manifest, atomic.

The tar archive stays beside the folder as `.NAME.tar.part` until it is complete; a later call resumes it. It is unpacked into
`.NAME.unpacking`, every file is verified, and the folder is renamed into place. Archive and folder coexist meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from oppo_client.errors import DownloadError, Unreachable
from oppo_client.messages import Request, error_reply, not_the_platform
from oppo_client.transport import Session

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
RANGE_NOT_SATISFIABLE = 416
CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """Paths of a download: the final folder, the partial archive, and the folder for unpacking."""

    folder: Path
    part: Path
    staging: Path


def plan_download(name: str, run_id: int, checkpoint_id: int, out: str | os.PathLike[str]) -> Target:
    """Paths for `out/NAME`. Raises `DownloadError` for a name that is not one folder's, `OSError` if `out` cannot be created."""
    if not name or not name.isprintable() or name.startswith(".") or any(c in name for c in "/\\:"):
        raise DownloadError(f"The checkpoint is called {name!r}, which is not a valid folder name.")
    base = Path(out).expanduser()
    base.mkdir(parents=True, exist_ok=True)
    # Checkpoints of other runs may have the same name.
    unique = f"{name}.{run_id}-{checkpoint_id}"
    return Target(base / name, base / f".{unique}.tar.part", base / f".{unique}.unpacking")


def is_downloaded(target: Target, digest: str) -> bool:
    """Whether the folder is this checkpoint. Raises `DownloadError` if it is something else."""
    if not os.path.lexists(target.folder):
        return False
    manifest = target.folder / MANIFEST
    if manifest.is_file() and hashlib.sha256(manifest.read_bytes()).hexdigest() == digest:
        return True
    raise DownloadError(f"{target.folder} already exists and is not this checkpoint. Use another folder.")


def fetch_archive(session: Session, run_id: int, checkpoint_id: int, target: Target, digest: str) -> None:
    """Download the archive to `target.part`. Raises `DownloadError`, `Unreachable`, `ApiError`; the partial archive stays."""
    retries, tries, last_size = session.retries, 0, -1
    while True:
        size = target.part.stat().st_size if target.part.exists() else 0
        tries = 1 if size > last_size else tries + 1  # progress resets the retries
        last_size = size
        try:
            reply = session.save(_range_request(run_id, checkpoint_id, size, digest), target.part)
        except Unreachable:
            if tries > retries.most:
                raise
            session.sleep(retries.pause_s(tries))
            continue
        if reply.ok and reply.content:
            raise not_the_platform(reply, f"it is {reply.media_type}")
        if reply.ok or (reply.status == RANGE_NOT_SATISFIABLE and size):
            return
        pause_s = retries.pause_after(reply.status, reply.headers, tries)
        if pause_s is None or tries > retries.most:
            raise error_reply(reply)
        session.sleep(pause_s)


def _range_request(run_id: int, checkpoint_id: int, start: int, digest: str) -> Request:
    """The archive from byte `start` if the checkpoint is unchanged, otherwise all of it."""
    headers = {"Accept": "application/x-tar, application/problem+json", "Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": f'"{digest}"'}
    return Request("GET", f"runs/{run_id}/checkpoints/{checkpoint_id}/download", headers=headers)


def unpack(target: Target, digest: str) -> None:
    """Unpack the archive, verify every file, and move the folder into place.

    Raises:
        DownloadError: the archive differs from the registered checkpoint (it is deleted), or cannot be written.
    """
    shutil.rmtree(target.staging, ignore_errors=True)
    try:
        target.staging.mkdir()
        with tarfile.open(target.part, "r:") as archive:
            _unpack_all(archive, target.staging, digest)
        _sync(target.staging)
        os.rename(target.staging, target.folder)
        _sync(target.folder.parent)
    except (tarfile.TarError, DownloadError) as error:
        target.part.unlink(missing_ok=True)
        raise DownloadError(f"The downloaded files differ from the registered checkpoint: {error}") from error
    except OSError as error:
        raise DownloadError(f"{error.filename or target.folder} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(target.staging, ignore_errors=True)
    target.part.unlink(missing_ok=True)


def _unpack_all(archive: tarfile.TarFile, folder: Path, digest: str) -> None:
    """Unpack the manifest, then its files, each once. Raises `DownloadError` for any other archive."""
    members = iter(archive)
    first = next(members, None)
    if first is None or not first.isreg() or _relative_path(first.name) != MANIFEST or first.size > MAX_MANIFEST_BYTES:
        raise DownloadError("it does not start with a manifest")
    content = _open(archive, first).read()
    if hashlib.sha256(content).hexdigest() != digest:
        raise DownloadError("its manifest differs")
    (folder / MANIFEST).write_bytes(content)
    missing = _parse_manifest(content)
    for member in members:
        expected = missing.pop(_relative_path(member.name), None)
        # Only regular files of the manifest are written: no links, devices or folders.
        if expected is None or not member.isreg():
            raise DownloadError(f"{member.name!r} is not in its manifest")
        _write(archive, member, folder / _relative_path(member.name), expected)
    if missing:
        raise DownloadError(f"{next(iter(missing))!r} and {len(missing) - 1} others are missing")


def _parse_manifest(manifest: bytes) -> dict[str, tuple[str, int]]:
    """Path → (SHA-256, bytes). Raises `DownloadError` for a path outside the folder."""
    try:
        listed = {str(path): (str(entry["sha256"]), int(entry["bytes"])) for path, entry in json.loads(manifest).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DownloadError("its manifest has an unknown format") from error
    for path in listed:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or set("\\\0:") & set(path) or str(pure) != path:
            raise DownloadError(f"its manifest names {path!r}, which is not a checkpoint file")
    return listed


def _relative_path(name: str) -> str:
    """The path without its first part, which is the name of the checkpoint."""
    return name.partition("/")[2]


def _open(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Any:
    content = archive.extractfile(member)
    if content is None:
        raise DownloadError(f"{member.name!r} is not a regular file")
    return content


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, expected: tuple[str, int]) -> None:
    digest, size = hashlib.sha256(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("xb")
    except (FileExistsError, NotADirectoryError):
        raise DownloadError(f"{member.name!r} occurs twice") from None
    with file, _open(archive, member) as content:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if (digest.hexdigest(), size) != expected:
        raise DownloadError(f"{member.name!r} is damaged")


def _sync(folder: Path) -> None:
    """fsync a folder, so that a rename survives a crash (POSIX)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
