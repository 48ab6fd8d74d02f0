"""The backup's file: a plain tar whose last members are a manifest with every other member's SHA-256, and the manifest's own.

    database.dump · checkpoints.json · keys.json? · checkpoints/12/0… · manifest.json · manifest.sha256

It is written under a hidden name, synced and renamed, so that a file under its own name is complete. Names of members are labels:
nothing is ever extracted to a path that the file names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from oppo_contract.machine import sync_folder
from oppo_platform.backup import BackupError, BackupRefused

FORMAT = 1
DATABASE, CHECKPOINTS = "database.dump", "checkpoints.json"
MANIFEST, SEAL = "manifest.json", "manifest.sha256"
# What a manifest of this format says at least.
SAYS: dict[str, type] = {
    "platform_version": str, "made_at": str, "postgres": str, "pg_dump": str, "migrations": dict, "rows": dict,
    "numbered_by_hand": list, "checkpoints": dict, "keys": dict,
}  # fmt: skip
LARGEST_MANIFEST = 64 * 1024 * 1024
READ_BYTES = 1024 * 1024
BLOCK = tarfile.BLOCKSIZE
PARTIAL = ".partial"

Tell = Callable[[str], None]
Write = Callable[[bytes], None]


class Writer:
    """Adds members to an open file, one after the other; sizes need not be known beforehand."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self.members: dict[str, dict[str, Any]] = {}

    @contextmanager
    def member(self, name: str) -> Iterator[Write]:
        """Yields the function that appends bytes to the member; its header is written at the end."""
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
        """A member of which everything is known."""
        with self.member(name) as write:
            write(content)

    def seal(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, with every member so far, and its own checksum: the end."""
        text = json.dumps({"format": FORMAT, **manifest, "members": dict(self.members)}, indent=1).encode()
        self.add(MANIFEST, text)
        self.add(SEAL, hashlib.sha256(text).hexdigest().encode())
        self._out.write(b"\0" * (2 * BLOCK))


def _header(name: str, size: int) -> bytes:
    told = tarfile.TarInfo(name)
    told.size, told.mode = size, 0o600
    header = told.tobuf(tarfile.GNU_FORMAT)  # sizes beyond 8 GiB fit into one block
    assert len(header) == BLOCK, name
    return header


@contextmanager
def new_archive(file: Path) -> Iterator[Writer]:
    """Write a backup: it stands under its name once this has ended well, and leaves nothing otherwise. Mode 0600.

    Raises:
        BackupRefused: something stands there already, or the folder cannot be written to.
        BackupError: there is no room, or the disk fails.
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
    """Delete what killed backups to this folder have left; one that is being written is locked."""
    for left in file.parent.glob(f".*{file.suffix}.????????{PARTIAL}"):
        try:
            with left.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
        except OSError:
            continue


@dataclass(slots=True)
class Archive:
    """A verified backup, open for reading: what it says, and where its members begin."""

    file: IO[bytes]
    manifest: dict[str, Any]
    places: dict[str, tuple[int, int]] = field(default_factory=dict)

    def pieces(self, name: str) -> Iterator[bytes]:
        """A member's bytes, a megabyte at a time."""
        offset, left = self.places[name]
        self.file.seek(offset)
        while left:
            piece = self.file.read(min(left, READ_BYTES))
            if not piece:
                raise BackupError("The backup has become shorter while it was read.")
            left -= len(piece)
            yield piece

    def read(self, name: str) -> bytes:
        """A small member."""
        return b"".join(self.pieces(name))


def refuse_incomplete(archive: Archive) -> None:
    """Raises BackupRefused when a backup with good checksums lacks what a restore needs: `oppo backup` did not write it so."""
    lacks = [name for name, kind in SAYS.items() if not isinstance(archive.manifest.get(name), kind)]
    lacks += [name for name in (DATABASE, CHECKPOINTS) if name not in archive.places]
    if lacks:
        raise BackupRefused(f"The backup is not what `oppo backup` writes: it lacks {', '.join(lacks)}. Nothing was changed.")


@contextmanager
def open_archive(path: Path, tell: Tell) -> Iterator[Archive]:
    """Open a backup and verify every byte of it.

    Raises:
        BackupRefused: it is none, is damaged or incomplete, or of a format that this version does not know.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise BackupRefused(f"{path} cannot be read: {error.strerror}.") from error
    with file:
        try:
            found = _verified(file, path.stat().st_size, tell)
        except (tarfile.TarError, ValueError, KeyError, TypeError, OSError) as error:
            raise BackupRefused(f"{path} is no backup, or a damaged one: {error}.") from error
        if damage := _complaint(found):
            raise BackupRefused(f"{path} is damaged: {damage}. Nothing was changed; take another backup.")
        yield found


def _verified(file: IO[bytes], size: int, tell: Tell) -> Archive:
    """Read everything; what was found is held against the manifest by `_complaint`."""
    found, digests = Archive(file, {}), {}
    with tarfile.open(fileobj=file, mode="r:") as tar:
        members = [(told.name, told.offset_data, told.size) for told in tar if told.isreg()]
    tell(f"Verifying {len(members)} members, {size:,} bytes …")
    for name, offset, length in members:
        if name in found.places:
            raise ValueError(f"it holds {name!r} twice")
        found.places[name] = (offset, length)
        digest = hashlib.sha256()
        for piece in found.pieces(name):
            digest.update(piece)
        digests[name] = {"bytes": length, "sha256": digest.hexdigest()}
    if SEAL not in found.places or MANIFEST not in found.places:
        raise ValueError("it has no manifest at its end, so it was cut off while it was written or copied")
    if found.places[MANIFEST][1] > LARGEST_MANIFEST:
        raise ValueError("its manifest is too large")
    if found.read(SEAL).decode("ascii", "replace") != digests[MANIFEST]["sha256"]:
        raise ValueError("its manifest was altered")
    found.manifest = json.loads(found.read(MANIFEST)) | {"found": {n: d for n, d in digests.items() if n not in (MANIFEST, SEAL)}}
    return found


def _complaint(archive: Archive) -> str:
    """What is wrong with a whole tar, in words; empty when nothing is."""
    told = archive.manifest
    if told.get("format") != FORMAT:
        made = told.get("platform_version", "another version")
        return f"it has format {told.get('format')} (of OPPO {made}), and this version reads format {FORMAT}"
    wanted, there = told.get("members"), told.pop("found")
    if not isinstance(wanted, dict):
        return "its manifest lists no members"
    for name in sorted({*wanted, *there}):
        if name not in there:
            return f"{name} is missing"
        if wanted.get(name) != there[name]:
            return f"{name} is not what was written: its checksum differs"
    return ""
