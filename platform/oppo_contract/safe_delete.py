"""Delete artifact folders without ever leaving the artifact root; used by the platform and by workers.

Guarantee: nothing outside the root is deleted, whatever the path, and even if a folder is replaced by a symlink meanwhile. The
path is opened folder by folder from the root with O_NOFOLLOW; the last folder is deleted by descriptor. Standard library only.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAX_TRIES = 10_000  # each try deletes something, so only a broken file system reaches the limit


class OutsideRootError(ValueError):
    """A path that is not below the root, or that contains a symlink."""


def file_url_path(url: str) -> Path:
    """The path of a `file://` URL of this host. Raises OutsideRootError for any other URL, and for a path with `..`."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise OutsideRootError(f"{url!r} is not a file:///… URL")
    if ".." in path.parts or "\0" in str(path):
        raise OutsideRootError(f"{url!r} is not a plain path")
    return path


def delete_run_folder(root_url: str, run_id: int, url: str) -> bool:
    """Delete the artifact folder of a run, or a folder below it. Returns whether it existed.

    Args:
        root_url: the artifact root; the run's folder is `runs/{run_id}` below it.
        run_id: the run.
        url: `file://` URL of the folder to delete.

    Raises:
        OutsideRootError: not a folder of this run, or the path contains a symlink.
        OSError: the root does not exist, or something could not be deleted; the deletion may be partial.
    """
    root, folder = file_url_path(root_url), file_url_path(url)
    if not folder.is_relative_to(root / "runs" / str(run_id)):
        raise OutsideRootError(f"{folder} is not a folder of run {run_id} below {root}")
    return delete_below(root, folder)


def delete_below(root: Path, folder: Path) -> bool:
    """Delete `folder`, an absolute path below `root`, with its content. Returns whether it existed.

    `root` must exist; it may itself be a symlink.

    Raises:
        OutsideRootError: not below the root, or the path contains a symlink.
        OSError: something could not be deleted; the deletion may be partial.
    """
    if not folder.is_relative_to(root) or folder == root or ".." in folder.parts:
        raise OutsideRootError(f"{folder} is not below {root}")
    *parents, name = folder.relative_to(root).parts
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parents:
            child = _open_folder(part, descriptor, folder)
            if child is None:
                return False
            os.close(descriptor)
            descriptor = child
        return _delete_tree(name, descriptor, folder)
    finally:
        os.close(descriptor)


def _open_folder(part: str, parent: int, folder: Path) -> int | None:
    try:
        return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutsideRootError(f"{part!r} in the path of {folder} is a link or not a folder") from error


def _delete_tree(name: str, parent: int, folder: Path) -> bool:
    existed = False
    for _ in range(MAX_TRIES):
        if (descriptor := _open_folder(name, parent, folder)) is None:
            return existed
        os.close(descriptor)
        existed = True
        with suppress(FileNotFoundError):  # deleted concurrently
            shutil.rmtree(name, dir_fd=parent)  # uses descriptors, and refuses a symlink
            return True
    raise OSError(f"{folder} cannot be deleted: its content keeps changing")
