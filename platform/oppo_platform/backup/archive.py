"""The backup file: a plain tar; its last members are a manifest with the SHA-256 of every other member, and the manifest's own.

    database.dump · checkpoints.json · keys.json? · checkpoints/12/0… · manifest.json · manifest.sha256

It is written under a hidden name, synced and renamed, so that a file with its final name is complete. Member names are never used
as paths for extraction.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from oppo_contract.machine import sync_folder
from oppo_platform.backup import BackupError, BackupRefused

FORMAT = 1
DATABASE, CHECKPOINTS = "database.dump", "checkpoints.json"
MANIFEST, MANIFEST_SUM = "manifest.json", "manifest.sha256"
# Required fields of a manifest.
REQUIRED_FIELDS: dict[str, type] = {
    "platform_version": str, "made_at": str, "postgres": str, "pg_dump": str, "migrations": dict, "rows": dict,
    "numbered_by_hand": list, "checkpoints": dict, "keys": dict,
}  # fmt: skip
LARGEST_MANIFEST = 64 * 1024 * 1024
READ_BYTES = 1024 * 1024
BLOCK = tarfile.BLOCKSIZE
PARTIAL = ".partial"

Report = Callable[[str], None]
Write = Callable[[bytes], None]


class Writer:
    """Writes members of unknown size to an open file, one after the other."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self.members: dict[str, dict[str, Any]] = {}

    @contextmanager
    def member(self, name: str) -> Iterator[Write]:
        """Yields a function that appends bytes to the member; the header is written at the end."""
        begin, digest, size = self._out.tell(), hashlib.sha256(), 0
        self._out.write(_header(name, 0))

        def write(piece: bytes) -> None:
            nonlocal size
            self._out.write(piece)
            digest.update(piece)
            size += len(piece)

        yield write
        self._out.write(b"\0" * (-size % BLOCK))
        end = self._out.tell()
        self._out.seek(begin)
        self._out.write(_header(name, size))
        self._out.seek(end)
        self.members[name] = {"bytes": size, "sha256": digest.hexdigest()}

    def add(self, name: str, content: bytes) -> None:
        """Add a complete member."""
        with self.member(name) as write:
            write(content)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest with all members, and its checksum, at the end."""
        text = json.dumps({"format": FORMAT, **manifest, "members": dict(self.members)}, indent=1).encode()
        self.add(MANIFEST, text)
        self.add(MANIFEST_SUM, hashlib.sha256(text).hexdigest().encode())
        self._out.write(b"\0" * (2 * BLOCK))


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    header = info.tobuf(tarfile.GNU_FORMAT)  # sizes beyond 8 GiB fit into one block
    assert len(header) == BLOCK, name
    return header


@contextmanager
def new_archive(file: Path) -> Iterator[Writer]:
    """Write a backup file with mode 0600; after an error no file is left.

    Raises:
        BackupRefused: the file exists, or the folder is not writable.
        BackupError: the disk is full or fails.
    """
    if os.path.lexists(file):
        raise BackupRefused(f"{file} is there already, and a backup overwrites nothing. Give another name, or a folder.")
    _clear_leftovers(file)
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise BackupRefused(f"{file.parent} cannot be written to: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "wb") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            yield Writer(out)
            out.flush()
            os.fsync(out.fileno())
            partial.rename(file)
        sync_folder(file.parent)
    except OSError as error:
        raise BackupError(f"The backup could not be written to {file.parent}: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def _clear_leftovers(file: Path) -> None:
    """Delete partial files of killed backups; files in progress are locked."""
    for left in file.parent.glob(f".*{file.suffix}.????????{PARTIAL}"):
        with suppress(OSError), left.open("rb") as partial:
            fcntl.flock(partial, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


@dataclass(slots=True)
class Archive:
    """A verified backup, open for reading. `places`: offset and size of each member."""

    file: IO[bytes]
    manifest: dict[str, Any]
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def pieces(self, name: str) -> Iterator[bytes]:
        """The bytes of a member, in chunks of a megabyte."""
        offset, left = self.places[name]
        self.file.seek(offset)
        while left:
            piece = self.file.read(min(left, READ_BYTES))
            if not piece:
                raise BackupError("The backup has become shorter while it was read.")
            left -= len(piece)
            yield piece

    def read(self, name: str) -> bytes:
        """The content of a small member."""
        return b"".join(self.pieces(name))


def check_complete(archive: Archive) -> None:
    """Raises BackupRefused if a backup with valid checksums lacks required fields or members."""
    lacks = [name for name, kind in REQUIRED_FIELDS.items() if not isinstance(archive.manifest.get(name), kind)]
    lacks += [name for name in (DATABASE, CHECKPOINTS) if name not in archive.places]
    if lacks:
        raise BackupRefused(f"The backup is not what `oppo backup` writes: it lacks {', '.join(lacks)}. Nothing was changed.")


@contextmanager
def open_archive(path: Path, report: Report) -> Iterator[Archive]:
    """Open a backup and verify every byte of it.

    Raises:
        BackupRefused: it is not a backup, is damaged or incomplete, or has an unknown format.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise BackupRefused(f"{path} cannot be read: {error.strerror}.") from error
    with file:
        try:
            archive = _verified(file, path.stat().st_size, report)
        except (tarfile.TarError, ValueError, KeyError, TypeError, OSError) as error:
            raise BackupRefused(f"{path} is no backup, or a damaged one: {error}.") from error
        if damage := _manifest_error(archive):
            raise BackupRefused(f"{path} is damaged: {damage}. Nothing was changed; take another backup.")
        yield archive


def _verified(file: IO[bytes], size: int, report: Report) -> Archive:
    """Read everything; `_manifest_error` compares the digests with the manifest."""
    archive, digests = Archive(file, {}), {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = [(info.name, info.offset_data, info.size) for info in tar if info.isreg()]
    report(f"Verifying {len(members)} members, {size:,} bytes …")
    for name, offset, length in members:
        if name in archive.places:
            raise ValueError(f"it holds {name!r} twice")
        archive.places[name] = (offset, length)
        digest = hashlib.sha256()
        for piece in archive.pieces(name):
            digest.update(piece)
        digests[name] = {"bytes": length, "sha256": digest.hexdigest()}
    if MANIFEST_SUM not in archive.places or MANIFEST not in archive.places:
        raise ValueError("it has no manifest at its end, so it was cut off while it was written or copied")
    if archive.places[MANIFEST][1] > LARGEST_MANIFEST:
        raise ValueError("its manifest is too large")
    if archive.read(MANIFEST_SUM).decode("ascii", "replace") != digests.pop(MANIFEST)["sha256"]:
        raise ValueError("its manifest was altered")
    del digests[MANIFEST_SUM]
    archive.manifest = json.loads(archive.read(MANIFEST)) | {"found": digests}
    return archive


def _manifest_error(archive: Archive) -> str:
    """The difference between the manifest and a readable tar, as text; empty without one."""
    manifest = archive.manifest
    if manifest.get("format") != FORMAT:
        made = manifest.get("platform_version", "another version")
        return f"it has format {manifest.get('format')} (of OPPO {made}), and this version reads format {FORMAT}"
    expected, actual = manifest.get("members"), manifest.pop("found")
    if not isinstance(expected, dict):
        return "its manifest lists no members"
    for name in sorted({*expected, *actual}):
        if name not in actual:
            return f"{name} is missing"
        if expected.get(name) != actual[name]:
            return f"{name} is not what was written: its checksum differs"
    return ""
