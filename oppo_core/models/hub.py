"""Models by hub id, `owner/name` or `owner/name@revision`: downloaded once into the first root, and pinned to their commit.

Only where the operator sets `OPPO_ALLOW_HUB=1`. A pinned id, `owner/name@commit`, names ROOT/cache/owner/name/commit, which
`oppo_contract.model_folder.find` finds without a hub.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oppo_contract.machine import mib
from oppo_contract.model_folder import ModelFolderError, cached_folder, find, may_be_hub_id, split_hub_id
from oppo_contract.spec import RunSpec, load_stored_spec

# Weights, configuration and tokenizer of the main folder; never pickles or code.
FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
IGNORED = ["*/*", "consolidated*.safetensors", "adapter_model.safetensors"]  # the same weights in another layout, or adapters
TIMEOUT_S = 30.0
REPORT_INTERVAL_S = 10.0
COMMIT = re.compile(r"[0-9a-f]{40}")
Place = tuple[str | int, ...]  # keys of a model in the spec's section `models`


def pin_hub_models(spec: RunSpec, roots: list[Path], saved: RunSpec | None, say: Callable[[str], None]) -> RunSpec:
    """The spec with every hub id pinned to a commit whose files are on this disk.

    Args:
        saved: the spec of the checkpoint to resume from; its commits are used again, also where a branch has moved since.
        say: gets a line about the progress of a download when it begins and every `REPORT_INTERVAL_S`.

    Raises:
        ModelFolderError: the hub cannot be reached, lacks the model or refuses it, no root is given, or its disk is too small.
    """
    before: dict[Place, str] = {}
    if saved is not None:
        _with_paths(saved, lambda place, path: before.setdefault(place, path))

    def pin(place: Place, path: str) -> str:
        known = before.get(place, "")
        if is_pinned(known) and split_hub_id(known)[0] == split_hub_id(path)[0] and not is_pinned(path):
            path = known
        try:
            find(path, roots)
        except ModelFolderError:
            # An entry that exists and cannot be used is reported by preflight: a hub's model of this name is another one.
            if may_be_hub_id(path) and not any(os.path.lexists(root / path) for root in roots):
                return _download(path, roots, say)
        return path

    return _with_paths(spec, pin)


def pinned_models(spec: RunSpec) -> dict[str, str]:
    """The models from a hub of a spec that `pin_hub_models` returned, `owner/name@commit` by role."""
    return {role: model.path for role, model in spec.role_models().items() if model.path is not None and is_pinned(model.path)}


def is_pinned(path: str) -> bool:
    """Whether a path is `owner/name@commit`."""
    return may_be_hub_id(path) and bool(COMMIT.fullmatch(split_hub_id(path)[1]))


def _with_paths(spec: RunSpec, change: Callable[[Place, str], str]) -> RunSpec:
    """The spec with `change` applied to the place and the path of every model."""

    def visit(value: Any, place: Place) -> Any:
        if isinstance(value, list):
            return [visit(item, (*place, number)) for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        return {
            key: change(place, inner) if key == "path" and isinstance(inner, str) else visit(inner, (*place, key))
            for key, inner in value.items()
        }

    data = spec.model_dump(mode="json")
    return load_stored_spec(data | {"models": visit(data["models"], ())})


def _download(path: str, roots: list[Path], say: Callable[[str], None]) -> str:
    """Download a model unless its folder exists; returns the pinned id."""
    import httpx2
    from huggingface_hub import HfApi, constants, snapshot_download

    if not roots:
        raise ModelFolderError(f"{path} is not on this disk, and no root is given to download it into; give --root FOLDER")
    name, revision = split_hub_id(path)
    try:
        commit = revision if is_pinned(path) else HfApi().model_info(name, revision=revision or None, timeout=TIMEOUT_S).sha
        assert commit is not None  # a repository has a commit
        folder = cached_folder(roots[0], name, commit)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the machine downloads it, the others wait
            if not folder.exists():
                draft = folder.with_name(f".{commit}.partial")  # hidden from the catalogue; an interrupted download continues
                chosen: Any = {"revision": commit, "local_dir": draft, "allow_patterns": FILES, "ignore_patterns": IGNORED}
                size = sum(file.file_size for file in snapshot_download(name, dry_run=True, **chosen))
                with _reported(f"{name}@{commit}", draft, size, say):
                    snapshot_download(name, **chosen)
                shutil.rmtree(draft / ".cache", ignore_errors=True)  # the library's records
                draft.rename(folder)
    except (httpx2.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFolderError(f"{path} cannot be downloaded from {constants.ENDPOINT}: {reason}") from error
    return f"{name}@{commit}"


@contextmanager
def _reported(name: str, draft: Path, size: int, say: Callable[[str], None]) -> Iterator[None]:
    """Report the progress of a download of `size` bytes into `draft`. Raises OSError if the disk has no room for it."""

    def present() -> int:
        return sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())

    def report() -> None:
        while not ended.wait(REPORT_INTERVAL_S):
            with suppress(OSError):  # files are renamed meanwhile
                say(f"Downloading {name}: {100 * present() // max(1, size)} % of {mib(size)}")

    free = shutil.disk_usage(draft.parent).free
    if size - present() > free:
        raise OSError(f"its files are {mib(size)}, and {draft.parent} has {mib(free)} free")
    ended = threading.Event()
    reporter = threading.Thread(target=report, daemon=True)
    say(f"Downloading {name}: {mib(size)}")
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
