"""Model folders: where a spec's path leads, and what config.json and the safetensors headers say. Nothing is loaded."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = "oppo_tiny"  # `model_type` of our own architecture
MAX_HEADER_BYTES = 10**8  # as in the safetensors library
PICKLED = "pytorch_model*.bin"
# Set to 1 by a worker's operator: engines may download models by hub id.
ALLOW_HUB = "OPPO_ALLOW_HUB"
CLASSIFIER = "ForSequenceClassification"

# Names that GPT-2's family gives the same sizes in config.json.
CONFIG_ALIASES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
# Model types whose config.json has `intermediate_size`, and whose feed-forward part is not gated.
UNGATED = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})


@dataclass(frozen=True, slots=True)
class ConfigSizes:
    """Sizes in a config.json: layers, hidden width, vocabulary, longest sequence, and numbers cached per token.

    `heads`: of queries. `inner_width`: of the feed-forward part, with experts of those that a token uses. `gated`: whether that
    part is gated.
    """

    layers: int
    width: int
    vocab: int
    context: int
    cached: int
    heads: int
    head_width: int
    inner_width: int
    gated: bool


class ModelFolderError(ValueError):
    """A model folder that cannot be used. The message names the folder, the reason and a remedy."""


def tokenizer_digest(file: Path) -> str:
    """SHA-256 of a tokenizer.json; equal digests mean equal tokens.

    Without its padding and truncation, which a trainer's last batch leaves in the file and runs do not use.

    Raises:
        ModelFolderError: it is not a JSON object.
    """
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelFolderError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelFolderError(f"{file} is not a JSON object")
    kept = {name: value for name, value in content.items() if name not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def hub_allowed() -> bool:
    """Whether the operator allows downloads from a hub on this machine."""
    return os.environ.get(ALLOW_HUB, "").strip() == "1"


def find(path: str, roots: list[Path]) -> Path:
    """The file or folder that `path` names: as it is, or below one of `roots`. Links are followed.

    Raises:
        ModelFolderError: it does not exist, is outside every root, or is a link that leads outside or to nothing.
    """
    as_is = Path(path)
    if os.path.exists(as_is):
        return as_is.resolve()
    problems = []
    for root in roots:
        candidate = Path(os.path.normpath(root / path))
        name, commit = split_hub_id(path)
        if may_be_hub_id(path) and commit and not os.path.lexists(candidate):
            candidate = cached_folder(root, name, commit)
        if not os.path.lexists(candidate) or not candidate.is_relative_to(os.path.normpath(root)):
            continue
        problem = link_problem(candidate, roots)
        if not problem:
            return candidate.resolve()
        problems.append(problem)
    searched = ", ".join(str(root) for root in roots) or "no root was given"
    raise ModelFolderError(problems[0] if problems else f"{path} does not exist here (looked in: {searched})")


def link_problem(path: Path, roots: list[Path]) -> str:
    """Why `path` cannot be used, if it is unreadable, or a link that leads out of `roots` or to nothing; otherwise empty."""
    target = Path(os.path.realpath(path))
    try:
        target.stat()
    except FileNotFoundError:
        return f"{path} is a link to {target}, which does not exist"
    except OSError as error:  # a folder of another user, or a loop of links
        return f"{path} leads to {target}, which cannot be read: {error.strerror}"
    if any(target.is_relative_to(os.path.realpath(root)) for root in roots):
        return ""
    noun, listed = "root" if len(roots) == 1 else "roots", ", ".join(str(root) for root in roots)
    remedy = "copy it or move it there, or make its folder a root too"
    return f"{path} is a link to {target}, outside the models {noun} {listed}; {remedy}"


def check_links(files: list[Path], roots: list[Path]) -> None:
    """Raises ModelFolderError for a file that is a link out of `roots`, or to nothing. Files that lie elsewhere may be any."""
    inside = [Path(absolute(root)) for root in roots for absolute in (os.path.abspath, os.path.realpath)]
    for file in files:
        if any(file.is_relative_to(root) for root in inside) and (problem := link_problem(file, roots)):
            raise ModelFolderError(problem)


def find_model(path: str, roots: list[Path]) -> Path:
    """`find` for a model. Raises ModelFolderError also as `check_model_files`."""
    folder = find(path, roots)
    check_model_files(folder, roots)
    return folder


def check_model_files(folder: Path, roots: list[Path]) -> None:
    """Check a model's files without opening them.

    Raises:
        ModelFolderError: one is a link out of `roots` or to nothing, it is a file, or its only weights are GGUF or pickles; then
            with the command that converts them.
    """
    if folder.is_dir():
        check_links(sorted(folder.iterdir()), roots)
    if folder.is_file():
        found, others = f"{folder} is a file", [folder]
    elif any(folder.glob("*.safetensors")):
        return
    else:
        others = sorted([*folder.glob("*.gguf"), *folder.glob(PICKLED)])
        found = f"{folder} has its weights in {others[0].name} only" if others else ""
    if not others:
        return
    needs = "a model is a folder with config.json and safetensors"
    converts = others[0].suffix == ".gguf" or others[0].match(PICKLED)
    raise ModelFolderError(f"{found}; {needs}" + (f"; convert it: oppo convert {folder} FOLDER" if converts else ""))


def may_be_hub_id(path: str) -> bool:
    """Whether `path` has the form owner/name, which transformers resolves on the hub."""
    return path.count("/") == 1 and not path.startswith((".", "/", "~")) and not path.endswith("/")


def split_hub_id(path: str) -> tuple[str, str]:
    """`owner/name` and the revision of a hub id; the revision is empty where none is given."""
    name, _, revision = path.partition("@")
    return name, revision


def cached_folder(root: Path, name: str, commit: str) -> Path:
    """The folder below a models root that holds a hub model's files at a commit."""
    return root / "cache" / name / commit


def read_config(folder: Path) -> dict[str, Any]:
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


def config_sizes(config: dict[str, Any]) -> ConfigSizes | None:
    """The sizes of a config.json, ours or Hugging Face's; None if one is missing or no whole number."""
    if config.get("model_type") == TINY:
        tiny = config.get("architecture")
        names = ("layers", "hidden", "vocab", "context", "heads")
        values = [_whole(tiny.get(name)) if isinstance(tiny, dict) else 0 for name in names]
        if not all(values):
            return None
        layers, width, vocab, context, heads = values
        return ConfigSizes(layers, width, vocab, context, 2 * layers * width, heads, width // heads, 4 * width, gated=False)
    nested = config.get("text_config")
    sizes: dict[str, Any] = nested if isinstance(nested, dict) and nested else config
    layers, width, heads, context = (
        _whole(sizes.get(name)) or _whole(sizes.get(alias)) for name, alias in CONFIG_ALIASES.items()
    )
    vocab = _whole(sizes.get("vocab_size"))
    if not (layers and width and heads and context and vocab):
        return None
    kv_heads = _whole(sizes.get("num_key_value_heads")) or heads
    head_width = _whole(sizes.get("head_dim")) or width // heads
    inner = _whole(sizes.get("moe_intermediate_size")) or _whole(sizes.get("intermediate_size"))
    inner *= _whole(sizes.get("num_experts_per_tok")) or 1
    gated = bool(inner) and sizes.get("model_type") not in UNGATED
    inner = inner or _whole(sizes.get("n_inner")) or 4 * width
    cached = 2 * layers * kv_heads * head_width
    return ConfigSizes(layers, width, vocab, context, cached, heads, head_width, inner, gated)


def _whole(value: object) -> int:
    """A positive whole number; 0 for any other value."""
    return value if type(value) is int and value > 0 else 0


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a model's weights: those of its index, or model.safetensors, otherwise all.

    Raises:
        ModelFolderError: the index is no JSON object with a `weight_map`, or names a file that is missing.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        return [single]
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelFolderError(f"{index} is not an index of weights: {error!r}") from None
    files = [folder / name for name in sorted(names)]
    if missing := [file.name for file in files if not file.exists()]:
        raise ModelFolderError(f"{folder} lacks {missing[0]}, which {index.name} names; copy it again")
    return files


def count_weights(folder: Path) -> int:
    """Numbers in a model's safetensors files, from their headers. Raises ModelFolderError when there are no such files."""
    files = weight_files(folder)
    if not files:
        raise ModelFolderError(f"{folder} has no safetensors; other weight files are never opened")
    count = 0
    for file in files:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            try:
                header = json.loads(content.read(size)) if size <= MAX_HEADER_BYTES else None
            except (ValueError, RecursionError):
                header = None
        if not isinstance(header, dict):
            raise ModelFolderError(f"{file} is not a complete safetensors file; copy it again")
        count += _numbers(header, file)
    return count


def _numbers(header: dict[str, Any], file: Path) -> int:
    """Numbers in the tensors of a safetensors header. Raises ModelFolderError for a header that does not describe `file`."""
    count = 0
    for name, tensor in header.items():
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        if name == "__metadata__":
            continue
        if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
            break
        count += math.prod(shape)
    else:
        if count <= 8 * file.stat().st_size:  # a number has one bit at least
            return count
    raise ModelFolderError(f"{file} is not a complete safetensors file; copy it again")


def label_count(config: dict[str, Any]) -> int:
    """Labels of a Hugging Face classifier, by the rule of transformers."""
    return len(config["id2label"]) if config.get("id2label") else int(config.get("num_labels", 2))


def check_reward_model(folder: Path, reads: str) -> None:
    """Raises ModelFolderError for a folder that cannot be a reward model, or not with this value of the setting `reads`."""
    config = read_config(folder)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "a model of no named architecture"
    if config.get("model_type") == TINY:
        if config.get("head") != "scalar":
            raise ModelFolderError(f"{folder} is a language model without a head for scores; a reward model has `head`: `scalar`")
    elif not name.endswith(CLASSIFIER):
        raise ModelFolderError(
            f"{folder} is {name}, which has no trained head for scores; a reward model is a sequence classifier (…{CLASSIFIER})"
            " with one label"
        )
    elif label_count(config) != 1:
        raise ModelFolderError(f"{folder} has {label_count(config)} labels; a reward model has one")
    if reads == "chat" and not has_chat_template(folder):
        raise ModelFolderError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), so the reward"
            " cannot read: chat; read: text needs none"
        )


def has_chat_template(folder: Path) -> bool:
    """Whether a folder's tokenizer has a chat template."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"))
    except (FileNotFoundError, ValueError, AttributeError):  # no such file, not JSON, or no object
        return False
