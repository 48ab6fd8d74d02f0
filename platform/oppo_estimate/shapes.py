"""Shapes of models, read from config.json and safetensors headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oppo_contract.model_folder import TINY, ModelFolderError, count_weights, find_model, hub_allowed, may_be_hub_id, read_config
from oppo_contract.sections.models import hub_advice
from oppo_contract.spec import ModelSpec, TinyArchitecture

Head = Literal["lm", "scalar"]
# Names that GPT-2's family gives the same sizes in config.json.
ALIASES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's number of weights, layers, hidden width, vocabulary, longest sequence, and numbers cached per token."""

    weights: int
    layers: int
    width: int
    vocab: int
    context: int
    cached: int


def read_shape(model: ModelSpec, head: Head, roots: list[Path]) -> Shape | None:
    """A model's shape; None if config.json does not have the sizes, or a hub has the folder, which may be downloaded.

    Raises:
        ModelFolderError: no such folder, or its config or weights cannot be read.
    """
    if model.tiny is not None:
        return tiny_shape(model.tiny, head)
    assert model.path is not None
    try:
        folder = find_model(model.path, roots)
    except ModelFolderError as error:
        if may_be_hub_id(model.path) and hub_allowed():
            return None
        raise ModelFolderError(f"{error}{hub_advice(model.path)}") from None
    config = read_config(folder)
    if config.get("model_type") == TINY:
        return tiny_shape(TinyArchitecture.model_validate(config["architecture"]), head)
    return _huggingface_shape(config, folder)


def tiny_shape(architecture: TinyArchitecture, head: Head) -> Shape:
    """Shape of our own architecture (`oppo_core.models.tiny_transformer`)."""
    a = architecture
    block = 12 * a.hidden**2 + 13 * a.hidden  # four linear layers with biases, two layer norms
    weights = (a.vocab + a.context) * a.hidden + a.layers * block + 2 * a.hidden
    if head == "scalar":
        weights += a.hidden + 1
    return Shape(weights, a.layers, a.hidden, a.vocab, a.context, 2 * a.layers * a.hidden)


def _huggingface_shape(config: dict[str, Any], folder: Path) -> Shape | None:
    sizes: dict[str, Any] = config.get("text_config") or config

    def size(name: str) -> int | None:
        return sizes.get(name) or sizes.get(ALIASES.get(name, name))

    layers, width, heads, context = (size(name) for name in ALIASES)
    vocab = size("vocab_size")
    if not (layers and width and heads and context and vocab):
        return None
    kv_heads = size("num_key_value_heads") or heads
    head_width = size("head_dim") or width // heads
    return Shape(count_weights(folder), layers, width, vocab, context, 2 * layers * kv_heads * head_width)
