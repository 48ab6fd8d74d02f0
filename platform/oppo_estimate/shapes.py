"""Shapes of models, read from config.json and safetensors headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oppo_contract.model_folder import (
    TINY,
    ModelFolderError,
    config_sizes,
    count_weights,
    find_model,
    hub_allowed,
    may_be_hub_id,
    read_config,
)
from oppo_contract.sections.models import hub_advice
from oppo_contract.spec import ModelSpec, TinyArchitecture

Head = Literal["lm", "scalar"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's number of weights, layers, hidden width, vocabulary, longest sequence, and numbers cached per token.

    `tied`: whether a language model's head has the embedding's weights; None: not known.
    """

    weights: int
    layers: int
    width: int
    vocab: int
    context: int
    cached: int
    tied: bool | None = None


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
    sizes = config_sizes(config)
    if sizes is None:
        return None
    tied = config.get("tie_word_embeddings")
    return Shape(count_weights(folder), sizes.layers, sizes.width, sizes.vocab, sizes.context, sizes.cached, tied)


def tiny_shape(architecture: TinyArchitecture, head: Head) -> Shape:
    """Shape of our own architecture (`oppo_core.models.tiny_transformer`)."""
    a = architecture
    block = 12 * a.hidden**2 + 13 * a.hidden  # four linear layers with biases, two layer norms
    weights = (a.vocab + a.context) * a.hidden + a.layers * block + 2 * a.hidden
    if head == "scalar":
        weights += a.hidden + 1
    return Shape(weights, a.layers, a.hidden, a.vocab, a.context, 2 * a.layers * a.hidden, tied=True)
