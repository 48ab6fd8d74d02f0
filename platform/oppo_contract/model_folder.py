"""Model folders: where a spec's path leads, and what config.json and the safetensors headers say. Nothing is loaded."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

TINY = "oppo_tiny"  # `model_type` of our own architecture


class ModelFolderError(ValueError):
    """A model folder that cannot be used. The message names the folder, the reason and a remedy."""


def find(path: str, roots: list[Path]) -> Path:
    """The file or folder that `path` names: as it is, or below one of `roots`. Links are followed.

    Raises:
        ModelFolderError: it does not exist, is outside every root, or is a link that leads outside or to nothing.
    """
    as_is = Path(path)
    if as_is.exists():
        return as_is.resolve()
    problems = []
    for root in roots:
        candidate = Path(os.path.normpath(root / path))
        if not os.path.lexists(candidate) or not candidate.is_relative_to(os.path.normpath(root)):
            continue
        problem = link_problem(candidate, roots)
        if not problem:
            return candidate.resolve()
        problems.append(problem)
    searched = ", ".join(str(root) for root in roots) or "no root was given"
    raise ModelFolderError(problems[0] if problems else f"{path} does not exist here (looked in: {searched})")


def link_problem(path: Path, roots: list[Path]) -> str:
    """Why `path` cannot be used, if it is a link that leads out of `roots` or to nothing; otherwise empty."""
    target = Path(os.path.realpath(path))
    if not target.exists():
        return f"{path} is a link to {target}, which does not exist"
    if any(target.is_relative_to(os.path.realpath(root)) for root in roots):
        return ""
    noun, listed = "root" if len(roots) == 1 else "roots", ", ".join(str(root) for root in roots)
    remedy = "copy it or move it there, or make its folder a root too"
    return f"{path} is a link to {target}, outside the models {noun} {listed}; {remedy}"


def may_be_hub_id(path: str) -> bool:
    """Whether `path` has the form owner/name, which transformers resolves on the hub."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")


def read_config(folder: Path) -> dict[str, object]:
    """A folder's config.json. Raises ModelFolderError when there is none or it is not a JSON object."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        needs = "a model folder needs config.json and model.safetensors"
        if (folder / "adapter_config.json").exists():
            needs = f"it has LoRA adapters alone; {needs}: write them with oppo export --merge"
        raise ModelFolderError(f"{folder} has no config.json; {needs}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise ModelFolderError(f"{folder / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFolderError(f"{folder / 'config.json'} is not a JSON object")
    return config


def count_weights(folder: Path) -> int:
    """Numbers in a folder's safetensors files, from their headers. Raises ModelFolderError when there are no such files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFolderError(f"{folder} has no safetensors; other weight files are never opened")
    count = 0
    for file in files:
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        count += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return count
