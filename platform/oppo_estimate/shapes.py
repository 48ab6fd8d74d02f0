"""Shapes of models, read from config.json and safetensors headers, or without weights from config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oppo_contract.config_weights import is_tied, weights_of_config
from oppo_contract.model_folder import (
    TINY,
    ModelFolderError,
    config_sizes,
    count_weights,
    find_model,
    hub_allowed,
    may_be_hub_id,
    read_config,
    weight_files,
)
from oppo_contract.sections.models import hub_advice
from oppo_contract.spec import ModelSpec, TinyArchitecture

Head = Literal["lm", "scalar"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's number of weights, layers, hidden width, vocabulary, longest sequence, and numbers cached per token.

    `tied`: whether a language model's head has the embedding's weights; None: not known. `query_width`: query heads × head width;
    `inner_width`: of the feed-forward part; 0: not known. `gated`: whether that part is gated and the norms are RMS norms.
    """

    weights: int
    layers: int
    width: int
    vocab: int
    context: int
    cached: int
    tied: bool | None = None
    query_width: int = 0
    inner_width: int = 0
    gated: bool = True

    @property
    def queries(self) -> int:
        """Numbers in a token's queries of one layer; the hidden width where it is not known."""
        return self.query_width or self.width

    @property
    def keys(self) -> int:
        """Numbers in a token's keys of one layer, and in its values."""
        return self.cached // (2 * max(1, self.layers))

    @property
    def feed_forward(self) -> int:
        """Inner width of the feed-forward part; where it is not known, what the weights of a block leave for it."""
        if self.inner_width:
            return self.inner_width
        tables = (2 if self.tied is False else 1) * self.vocab * self.width
        block = (self.weights - tables) // max(1, self.layers) - 2 * self.width * (self.queries + self.keys)
        return max(0, block // ((3 if self.gated else 2) * self.width))


def read_shape(model: ModelSpec, head: Head, roots: list[Path]) -> Shape | None:
    """A model's shape; None if config.json does not have the sizes, or a hub has the folder, which may be downloaded.

    Raises:
        ModelFolderError: no such folder, its config or weights cannot be read, or it has no weights and their number does not
            follow from its config.json.
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
    return Shape(
        _count(folder, config, head), sizes.layers, sizes.width, sizes.vocab, sizes.context,
        sizes.cached, is_tied(config), sizes.heads * sizes.head_width, sizes.inner_width, sizes.gated,
    )  # fmt: skip


def _count(folder: Path, config: dict[str, Any], head: Head) -> int:
    """Number of weights, from the safetensors' headers, or where there are none from config.json."""
    if weight_files(folder):
        return count_weights(folder)
    weights = weights_of_config(config, is_language_model=head == "lm")
    if weights is None:
        kind = config.get("model_type")
        raise ModelFolderError(f"{folder} has no safetensors, and {kind} is not one whose weights are counted from config.json")
    return weights


def tiny_shape(architecture: TinyArchitecture, head: Head) -> Shape:
    """Shape of our own architecture (`oppo_core.models.tiny_transformer`)."""
    a = architecture
    block = 12 * a.hidden**2 + 13 * a.hidden  # four linear layers with biases, two layer norms
    weights = (a.vocab + a.context) * a.hidden + a.layers * block + 2 * a.hidden
    if head == "scalar":
        weights += a.hidden + 1
    cached = 2 * a.layers * a.hidden
    return Shape(weights, a.layers, a.hidden, a.vocab, a.context, cached, True, a.hidden, 4 * a.hidden, gated=False)
