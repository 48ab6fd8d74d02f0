"""Where checkpoints live. Every path that comes out of a URL or an event goes through `contained`, at the time of use."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

MANIFEST = "manifest.json"


class ArtifactError(ValueError):
    """An artifact that lies where it must not, or is not what was registered."""


class ArtifactStore(Protocol):
    """Folders under URLs. `file://` on a shared path is the first implementation."""

    def folder(self, url: str) -> Path:
        """A local folder for the URL, to write into or to read from. Raises ArtifactError."""
        ...

    def url(self, folder: Path) -> str:
        """The URL under which another node finds the folder. Raises ArtifactError."""
        ...


class FileStore:
    """Artifacts below one folder, which every node that shares them mounts at the same path."""

    def __init__(self, root_url: str) -> None:
        self.root = path_of(root_url).resolve()

    def folder(self, url: str) -> Path:
        """See `ArtifactStore`."""
        return contained(self.root, path_of(url))

    def url(self, folder: Path) -> str:
        """See `ArtifactStore`."""
        return contained(self.root, folder).as_uri()


def path_of(url: str) -> Path:
    """The path in a `file://` URL of this host.

    Raises:
        ArtifactError: another scheme, another host, or a relative path.
    """
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise ArtifactError(f"{url!r} is not a file:///… URL")
    return path


def contained(root: Path, path: Path) -> Path:
    """`path` (relative paths count from `root`) with every link and `..` resolved; it must lie in `root`.

    Raises:
        ArtifactError: it leads outside.
    """
    resolved = (root / path).resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise ArtifactError(f"{path} leads outside {root}")
    return resolved


def check_manifest(folder: Path, manifest_sha256: str) -> None:
    """Make sure that a checkpoint is the one that was registered; the engine checks each file against the manifest.

    Raises:
        ArtifactError: its manifest is another one.
        FileNotFoundError: it is missing here, which may be the node's fault: a file system that is not mounted, say.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise FileNotFoundError(f"the checkpoint {folder} is missing")
    found = hashlib.sha256(manifest.read_bytes()).hexdigest()
    if found != manifest_sha256:
        raise ArtifactError(
            f"the checkpoint {folder} is damaged: its manifest is {found[:12]}…, registered was {manifest_sha256[:12]}…"
        )
