"""Deleting a folder of artifacts, contained: the one function that does so, on the platform's machine and on workers.

Law: nothing outside the root is ever deleted, whoever wrote the path, and whatever is swapped for a link meanwhile. The way down
is walked folder by folder from the open root, and no link is followed on it; what is below the last folder is deleted without
following links either. Standard library only.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

MOST_TRIES = 10_000  # each time a part of the folder is gone, so that only a broken file system comes to the end


class OutsideRootError(ValueError):
    """A path that does not lie below the root, or whose way there leads over a link."""


def file_url_path(url: str) -> Path:
    """The path of a `file://` URL of this host. Raises OutsideRootError for anything else, and for one with `..` in it."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise OutsideRootError(f"{url!r} is not a file:///… URL")
    if ".." in path.parts or "\0" in str(path):
        raise OutsideRootError(f"{url!r} is not a plain path")
    return path


def delete_run_folder(root_url: str, run_id: int, url: str) -> bool:
    """Delete a folder of a run's artifacts, or all of them. Returns whether there was one.

    Args:
        root_url: where all artifacts lie.
        run_id: the run, whose artifacts lie in `runs/{run_id}` below it.
        url: `file://` URL of that folder or of one below it.

    Raises:
        OutsideRootError: it is no folder of that run, or a link stands on the way or in its place.
        OSError: something could not be deleted, or the root is not there; what had been deleted by then is gone.
    """
    root, folder = file_url_path(root_url), file_url_path(url)
    if not folder.is_relative_to(root / "runs" / str(run_id)):
        raise OutsideRootError(f"{folder} is not a folder of run {run_id} below {root}")
    return delete_below(root, folder)


def delete_below(root: Path, folder: Path) -> bool:
    """Delete `folder` with everything in it. Returns whether there was one.

    Args:
        root: a folder that exists; it may be a link itself, as a mounted store may.
        folder: below it, absolute.

    Raises:
        OutsideRootError: it is not below the root, or a link stands on the way or in its place.
        OSError: something could not be deleted; what had been by then is gone.
    """
    if not folder.is_relative_to(root) or folder == root or ".." in folder.parts:
        raise OutsideRootError(f"{folder} does not lie below {root}")
    *way, name = folder.relative_to(root).parts
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in way:
            deeper = _opened(part, descriptor, folder)
            if deeper is None:
                return False
            os.close(descriptor)
            descriptor = deeper
        return _removed(name, descriptor, folder)
    finally:
        os.close(descriptor)


def _opened(part: str, above: int, folder: Path) -> int | None:
    try:
        return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutsideRootError(f"{part!r} on the way to {folder} is a link or no folder") from error


def _removed(name: str, above: int, folder: Path) -> bool:
    found = _opened(name, above, folder)
    if found is None:
        return False
    os.close(found)
    for _ in range(MOST_TRIES):
        with suppress(FileNotFoundError):  # somebody else deletes it as well, and was faster with a part of it
            shutil.rmtree(name, dir_fd=above)  # with descriptors all the way down; refuses a link that took its place meanwhile
            return True
        if (found := _opened(name, above, folder)) is None:
            return True
        os.close(found)
    raise OSError(f"{folder} cannot be deleted: what is in it comes and goes")
