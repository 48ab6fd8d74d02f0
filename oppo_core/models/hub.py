"""Models by hub id, `owner/name` or `owner/name@revision`: downloaded once into the first root, and pinned to their commit.

Only where the operator sets `OPPO_ALLOW_HUB=1`. A pinned id, `owner/name@commit`, names ROOT/cache/owner/name/commit, which
`oppo_contract.model_folder.find` finds without a hub.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oppo_contract.model_folder import ALLOW_HUB, ModelFolderError, cached_folder, find, may_be_hub_id, split_hub_id
from oppo_contract.spec import RunSpec, load_stored_spec

# Weights, configuration and tokenizer of the main folder; never pickles or code.
FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
TIMEOUT_S = 30.0


def hub_allowed() -> bool:
    """Whether the operator allows downloads from a hub on this machine."""
    return os.environ.get(ALLOW_HUB, "").strip() == "1"


def pin_hub_models(spec: RunSpec, roots: list[Path], saved: RunSpec | None) -> RunSpec:
    """The spec with every hub id pinned to a commit whose files are on this disk.

    Args:
        saved: the spec of the checkpoint to resume from; its commits are used again.

    Raises:
        ModelFolderError: the hub cannot be reached, lacks the model or refuses it, or no root is given.
    """
    commits = {} if saved is None else pinned_commits(saved)

    def pin(path: str) -> str:
        try:
            find(path, roots)
        except ModelFolderError:
            if may_be_hub_id(path):
                return _download(path, roots, commits.get(split_hub_id(path)[0]))
        return path

    return _with_paths(spec, pin)


def pinned_commits(spec: RunSpec) -> dict[str, str]:
    """The commit of each hub model of a spec that `pin_hub_models` returned, by `owner/name`."""
    paths = [model.path for model in spec.role_models().values() if model.path is not None and may_be_hub_id(model.path)]
    return {name: commit for name, commit in map(split_hub_id, paths) if commit}


def _with_paths(spec: RunSpec, change: Callable[[str], str]) -> RunSpec:
    """The spec with `change` applied to the path of every model."""

    def visit(value: Any) -> Any:
        if isinstance(value, list):
            return [visit(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {key: change(inner) if key == "path" and isinstance(inner, str) else visit(inner) for key, inner in value.items()}

    data = spec.model_dump(mode="json")
    return load_stored_spec(data | {"models": visit(data["models"])})


def _download(path: str, roots: list[Path], commit: str | None) -> str:
    """Download a model unless its folder exists; returns the pinned id. `commit`: of an earlier part of the run."""
    import httpx2
    from huggingface_hub import HfApi, constants, snapshot_download

    if not roots:
        raise ModelFolderError(f"{path} is not on this disk, and no root is given to download it into; give --root FOLDER")
    name, revision = split_hub_id(path)
    try:
        commit = commit or HfApi().model_info(name, revision=revision or None, timeout=TIMEOUT_S).sha
        assert commit is not None  # a repository has a commit
        folder = cached_folder(roots[0], name, commit)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the machine downloads it, the others wait
            if not folder.exists():
                draft = folder.with_name(f".{commit}.partial")  # hidden from the catalogue; an interrupted download continues
                snapshot_download(name, revision=commit, local_dir=draft, allow_patterns=FILES, ignore_patterns=["*/*"])
                shutil.rmtree(draft / ".cache", ignore_errors=True)  # the library's records
                draft.rename(folder)
    except (httpx2.HTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelFolderError(f"{path} cannot be downloaded from {constants.ENDPOINT}: {reason}") from error
    return f"{name}@{commit}"
