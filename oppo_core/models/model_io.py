"""Model folders: config.json, model.safetensors, tokenizer.json; in our own and in Hugging Face's format.

Only safetensors and JSON are read, never a pickle.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from oppo_contract.model_folder import TINY, ModelFolderError, find_model, read_config
from oppo_contract.sections.models import Lora
from oppo_contract.spec import ModelSpec, TinyArchitecture
from oppo_core.models.adapters import (
    has_lora,
    inject_lora,
    load_adapter,
    load_trained_weights,
    merged_weights,
    save_adapter,
    saved_module,
)
from oppo_core.models.protocol import Network
from oppo_core.models.shared_weights import copy_sharing_weights
from oppo_core.models.tensor_files import Writer, save_weights
from oppo_core.models.tiny_transformer import Head, TinyTransformer, init_tiny

if TYPE_CHECKING:
    from oppo_core.models.huggingface import HuggingFaceNetwork

OLD_ADAPTERS = "adapters.safetensors"  # in checkpoints of earlier versions, beside the merged model
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
CPU = torch.device("cpu")
WRITER = Writer()


def load_model(
    spec: ModelSpec,
    head: Head,
    roots: list[Path],
    dtype: torch.dtype,
    seed: int,
    lora: Lora | None = None,
    device: torch.device = CPU,
    sharded: bool = False,
) -> Network:
    """Load the network of a `ModelSpec`, in `dtype` on `device`, in evaluation mode, dropout off.

    A folder with another head gives its backbone, and a new scalar head starts at zero. `seed` initialises a built-in
    architecture and the adapters of `lora`. `sharded`: it will be sharded over the ranks (`ShardedModule`), which then reads the
    weights of a Hugging Face model; with adapters it is loaded whole, because their digest covers all frozen weights.

    Raises:
        ModelFolderError: no such folder, no config.json, weights that do not fit it, or adapters for layers it lacks.
    """
    if sharded and lora is None and spec.path is not None and not _is_ours(folder := find_model(spec.path, roots)):
        from oppo_core.models.huggingface_io import build_on_meta

        return build_on_meta(str(folder), head, dtype, device)
    network = _load(spec, head, roots, dtype, seed)
    if lora is not None:
        inject_lora(network, lora, seed)
    return network.to(device)


def load_with_base(
    spec: ModelSpec, roots: list[Path], dtype: torch.dtype, seed: int, lora: Lora, device: torch.device = CPU
) -> tuple[Network, Network]:
    """A language model with adapters, as `load_model` gives it, and the plain one: two networks over the same frozen weights.

    Raises:
        ModelFolderError: see `load_model`.
    """
    network = _load(spec, "lm", roots, dtype, seed)
    base = copy_sharing_weights(network)
    inject_lora(network, lora, seed)
    return network.to(device), base.to(device)


def _load(spec: ModelSpec, head: Head, roots: list[Path], dtype: torch.dtype, seed: int) -> TinyTransformer | HuggingFaceNetwork:
    if spec.tiny is not None:
        return init_tiny(spec.tiny, head, seed).to(dtype).eval()
    assert spec.path is not None
    folder = find_model(spec.path, roots)
    if _is_ours(folder):
        return load_tiny(folder, head).to(dtype).eval()
    from oppo_core.models.huggingface_io import load_huggingface  # transformers takes seconds to import

    return load_huggingface(str(folder), head, dtype)


def _is_ours(folder: Path) -> bool:
    return bool(read_config(folder).get("model_type") == TINY)


def load_tiny(folder: Path, head: Head) -> TinyTransformer:
    """Our own architecture from a folder. Raises ModelFolderError when weights are missing or do not fit."""
    config = read_config(folder)
    architecture = TinyArchitecture.model_validate(config["architecture"])
    model = TinyTransformer(architecture, head)
    weights = load_file(folder / "model.safetensors")
    backbone = {name: weight for name, weight in weights.items() if not name.startswith("head.")}
    if head == "scalar" and "head.weight" in weights:
        backbone |= {name: weights[name] for name in ("head.weight", "head.bias")}
    elif head == "scalar":
        backbone |= {"head.weight": torch.zeros(1, architecture.hidden), "head.bias": torch.zeros(1)}
    try:
        model.load_state_dict(backbone, assign=True)  # in the file's precision
    except RuntimeError as error:
        raise ModelFolderError(f"the weights in {folder} do not fit its config.json: {error}") from None
    return model


def save_tiny(
    model: TinyTransformer, folder: Path, tokenizer: Path | None = None, weights: dict[str, Tensor] | None = None, **config: int
) -> None:
    """Write our architecture as a model folder; `config` takes eos_token_id, bos_token_id, pad_token_id.

    `weights` replace the model's own, by the same names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head = "scalar" if model.head is not None else "lm"
    fields = {"model_type": TINY, "head": head, "architecture": model.architecture.model_dump(), **config}
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    save_weights(model.state_dict() if weights is None else weights, folder / "model.safetensors")
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")


def save_actor(
    network: Network, folder: Path, source: Path | None, eos: int, pad: int, writer: Writer = WRITER
) -> None:  # fmt: skip
    """Write a network as a model folder of its own format, or its adapters as a `peft` folder, with the tokenizer of `source`.

    A Hugging Face model becomes a folder that `from_pretrained` reads. `writer`: of whole models; adapters are written at once.
    """
    assert isinstance(network, nn.Module)
    if not has_lora(network):
        weights = writer.copy(saved_module(network).state_dict())
        writer.add(partial(_save_plain, network, weights, folder, source, eos, pad))
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_adapter(network, folder, source)
    _copy_tokenizer(source, folder)


def save_merged(network: Network, folder: Path, source: Path | None, eos: int, pad: int) -> None:
    """As `save_actor`, but with adapters merged into the weights, in float32.

    Converts the network to float32, unless it is in float64.
    """
    assert isinstance(network, nn.Module)
    if next(network.parameters()).dtype != torch.float64:
        network.to(torch.float32)
    _save_plain(network, merged_weights(network), folder, source, eos, pad)


def _save_plain(
    network: nn.Module, weights: dict[str, Tensor], folder: Path, source: Path | None, eos: int, pad: int
) -> None:  # fmt: skip
    if isinstance(network, TinyTransformer):
        save_tiny(network, folder, None, weights, eos_token_id=eos, pad_token_id=pad)
    else:
        from oppo_core.models.huggingface_io import export_huggingface

        export_huggingface(network, folder, weights)
    _copy_tokenizer(source, folder)


def _copy_tokenizer(source: Path | None, folder: Path) -> None:
    for name in TOKENIZER_FILES:
        if source is not None and (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def restore_weights(network: Network, folder: Path) -> None:
    """Restore the result of `save_actor`.

    Raises:
        ModelFolderError: adapters were trained with other frozen weights than the network's.
    """
    if has_lora(network):
        assert isinstance(network, nn.Module)
        if (folder / OLD_ADAPTERS).exists():
            load_trained_weights(network, load_file(folder / OLD_ADAPTERS))
        else:
            load_adapter(network, folder)
        return
    if isinstance(network, TinyTransformer):
        network.load_state_dict(load_file(folder / "model.safetensors"))
        return
    from oppo_core.models.huggingface_io import restore_huggingface

    restore_huggingface(network, folder)
