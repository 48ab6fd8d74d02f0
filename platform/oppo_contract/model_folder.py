"""Model folders: where a spec's path leads, and what config.json and the safetensors headers say. Nothing is loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path

TINY = "oppo_tiny"  # `model_type` of our own architecture


class ModelFolderError(ValueError):
    """A model folder that cannot be used. The message names the folder, the reason and a remedy."""


def find(path: str, roots: list[Path]) -> Path:
    """The file or folder that `path` names: as it is, or below one of `roots`.

    Raises:
        ModelFolderError: it does not exist, or is outside every root.
    """
    as_is = Path(path)
    if as_is.exists():
        return as_is.resolve()
    for root in roots:
        candidate = (root / path).resolve()
        if candidate.is_relative_to(root.resolve()) and candidate.exists():
            return candidate
    searched = ", ".join(str(root) for root in roots) or "no root was given"
    raise ModelFolderError(f"{path} does not exist here (looked in: {searched})")


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
    except json.JSONDecodeError as error:
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
