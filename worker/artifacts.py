"""Paths of checkpoints below the artifact root. URLs and event paths are checked for containment at every use."""

from __future__ import annotations

import hashlib
from pathlib import Path

from oppo_contract.safe_delete import OutsideRootError, file_url_path

MANIFEST = "manifest.json"


class ArtifactError(ValueError):
    """An artifact outside its root, or with another checksum than registered."""


class FileStore:
    """Artifacts below one folder, mounted at the same path on every node."""

    def __init__(self, root_url: str) -> None:
        self.root = url_path(root_url).resolve()

    def folder(self, url: str) -> Path:
        """The local folder of a URL. Raises ArtifactError."""
        return contained(self.root, url_path(url))


def url_path(url: str) -> Path:
    """The path of a `file://` URL of this host. Raises ArtifactError."""
    try:
        return file_url_path(url)
    except OutsideRootError as error:
        raise ArtifactError(str(error)) from None


def contained(root: Path, path: Path) -> Path:
    """Resolve links and `..` in `path`, relative to `root`. Raises ArtifactError if the result is outside `root`."""
    resolved = (root / path).resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise ArtifactError(f"{path} leads outside {root}")
    return resolved


def check_manifest(folder: Path, manifest_sha256: str) -> None:
    """Verify the checksum of a checkpoint's manifest; the engine verifies each file against the manifest.

    Raises:
        ArtifactError: another checksum.
        FileNotFoundError: no manifest, for example because a file system is not mounted on this node.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise FileNotFoundError(f"the checkpoint {folder} is missing")
    actual = hashlib.sha256(manifest.read_bytes()).hexdigest()
    if actual != manifest_sha256:
        raise ArtifactError(
            f"the checkpoint {folder} is damaged: its manifest is {actual[:12]}…, registered was {manifest_sha256[:12]}…"
        )
