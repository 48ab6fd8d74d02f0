"""A checkpoint from the platform to a folder: resumed where it broke off, checked by its manifest, whole or not there at all.

The tar is kept beside the folder as `.NAME.tar.part` until it is complete; a later call goes on from its end. It is unpacked into
`.NAME.unpacking`, every file checked, and the folder renamed into place. Meanwhile both take the checkpoint's size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from oppo_client.errors import DownloadError, Unreachable
from oppo_client.retry import Retries
from oppo_client.sans_io import Flow, Pause, Reply, Request, Save, get, not_the_platform, refusal

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 16 * 1024 * 1024
PARTIAL, NOT_THERE = 206, 416
PIECE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint goes, and what is there meanwhile."""

    folder: Path
    part: Path
    staging: Path


def target_of(name: str, run_id: int, checkpoint_id: int, out: str | os.PathLike[str]) -> Target:
    """The folder `out/NAME`. Raises `DownloadError` for a name that would lead elsewhere, `OSError` when `out` cannot be made."""
    if not name or not name.isprintable() or name.startswith(".") or any(c in name for c in "/\\:"):
        raise DownloadError(f"The checkpoint is called {name!r}, which is not a valid folder name.")
    base = Path(out).expanduser()
    base.mkdir(parents=True, exist_ok=True)
    # The numbers keep the rest of another run's checkpoint of the same name from being taken for this one's.
    rest = f"{name}.{run_id}-{checkpoint_id}"
    return Target(base / name, base / f".{rest}.tar.part", base / f".{rest}.unpacking")


def fetched(run_id: int, told: Mapping[str, Any], target: Target, retries: Retries) -> Flow[Path]:
    """The whole tar on this disk. Raises `DownloadError`, `Unreachable` or an `ApiError`; what has come so far stays."""
    path = f"runs/{int(run_id)}/checkpoints/{int(told['id'])}/download"
    tries, before = 0, -1
    while True:
        have = target.part.stat().st_size if target.part.exists() else 0
        tries = 1 if have > before else tries + 1  # what moves on is not given up
        before = have
        try:
            reply: Reply = yield Save(_from(path, have, told["manifest_sha256"]), target.part)
        except Unreachable:
            if tries > retries.most:
                raise
            yield Pause(retries.pause_s(tries))
            continue
        if reply.ok and reply.content:
            raise not_the_platform(reply, f"it is {reply.kind}")
        if reply.ok or (reply.status == NOT_THERE and have):
            return target.part
        pause_s = retries.pause_after(reply.status, reply.headers, tries)
        if pause_s is None or tries > retries.most:
            raise refusal(reply)
        yield Pause(pause_s)


def _from(path: str, have: int, digest: str) -> Request:
    """From the byte that is lacking on, provided that the checkpoint is still the same; else all of it."""
    headers = {"Accept": "application/x-tar, application/problem+json", "Accept-Encoding": "identity"}
    if have:
        headers |= {"Range": f"bytes={have}-", "If-Range": f'"{digest}"'}
    request = get(path)
    return Request(request.method, request.path, request.params, None, headers)


def unpack(target: Target, told: Mapping[str, Any]) -> Path:
    """Unpack the tar, check every file, and put the folder into place. Returns it.

    Raises:
        DownloadError: the archive is not the checkpoint that was registered (it is deleted), or the disk is full.
    """
    shutil.rmtree(target.staging, ignore_errors=True)
    try:
        target.staging.mkdir()
        with tarfile.open(target.part, "r:") as archive:
            _unpack_all(archive, target.staging, str(told["manifest_sha256"]))
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
    return target.folder


def _unpack_all(archive: tarfile.TarFile, folder: Path, digest: str) -> None:
    """The manifest first, then the files that it lists, each once; anything else in the archive is a fault."""
    members = iter(archive)
    first = next(members, None)
    if first is None or not first.isreg() or _below(first.name) != MANIFEST or first.size > LARGEST_MANIFEST:
        raise DownloadError("it does not start with a manifest")
    content = _open(archive, first).read()
    if hashlib.sha256(content).hexdigest() != digest:
        raise DownloadError("its manifest differs")
    (folder / MANIFEST).write_bytes(content)
    wanted = _files_of(content)
    for member in members:
        expected = wanted.pop(_below(member.name), None)
        # Links, devices and folders are not written, nor is anything outside: only plain files that the manifest lists.
        if expected is None or not member.isreg():
            raise DownloadError(f"{member.name!r} is not in its manifest")
        _write(archive, member, folder / _below(member.name), expected)
    if wanted:
        raise DownloadError(f"{next(iter(wanted))!r} and {len(wanted) - 1} others are missing")


def _files_of(manifest: bytes) -> dict[str, tuple[str, int]]:
    """Path → (SHA-256, bytes). Raises `DownloadError` for a path that would lead out of the folder."""
    try:
        listed = {str(path): (str(entry["sha256"]), int(entry["bytes"])) for path, entry in json.loads(manifest).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DownloadError("its manifest has an unknown format") from error
    for path in listed:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or set("\\\0:") & set(path) or str(pure) != path:
            raise DownloadError(f"its manifest names {path!r}, which is not a checkpoint file")
    return listed


def _below(name: str) -> str:
    """The path in the checkpoint; its first part is the checkpoint's own name."""
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
    except (FileExistsError, NotADirectoryError):  # the folder was empty: the archive contradicts itself
        raise DownloadError(f"{member.name!r} occurs twice") from None
    with file, _open(archive, member) as content:
        while piece := content.read(PIECE):
            digest.update(piece)
            size += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    if (digest.hexdigest(), size) != expected:
        raise DownloadError(f"{member.name!r} is damaged")


def there_already(target: Target, told: Mapping[str, Any]) -> bool:
    """Whether this very checkpoint is in the folder. Raises `DownloadError` when something else is."""
    if not os.path.lexists(target.folder):
        return False
    manifest = target.folder / MANIFEST
    if manifest.is_file() and hashlib.sha256(manifest.read_bytes()).hexdigest() == told["manifest_sha256"]:
        return True
    raise DownloadError(f"{target.folder} already exists and is not this checkpoint. Use another folder.")


def _sync(folder: Path) -> None:
    """So that the rename survives a crash of the machine, where folders can be synced at all."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
