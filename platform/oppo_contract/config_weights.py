"""The number of a model's weights from config.json alone, for architectures whose layers are known here."""

from __future__ import annotations

from typing import Any

from oppo_contract.model_folder import config_sizes

# Norms over the hidden width in a block, by model type. All have four attention matrices, a gated feed-forward part of three
# matrices, and a norm before the head.
NORMS = {
    "gemma": 2, "gemma2": 4, "gemma3_text": 4, "granite": 2, "llama": 2, "mistral": 2, "phi3": 2, "qwen2": 2, "qwen3": 2,
    "smollm3": 2,
}  # fmt: skip
HEAD_NORMS = frozenset({"gemma3_text", "qwen3"})  # norms over the width of a head, of queries and of keys
# Model types that ignore `attention_bias`, and those with `mlp_bias`.
WITHOUT_BIAS = frozenset({"mistral", "phi3", "qwen2"})
FEED_FORWARD_BIAS = frozenset({"granite", "llama", "smollm3"})
# The value of `tie_word_embeddings` where config.json lacks it: transformers does not write its defaults.
TIED = frozenset({"cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt2", "smollm3"})


def is_tied(config: dict[str, Any]) -> bool | None:
    """Whether a language model's head has the embedding's weights; None: config.json does not say."""
    given, kind = config.get("tie_word_embeddings"), config.get("model_type")
    if isinstance(given, bool):
        return given
    return kind in TIED if kind in TIED or kind in NORMS else None


def weights_of_config(config: dict[str, Any], is_language_model: bool) -> int | None:
    """Number of weights of a language model, or of a classifier with one label; None: not known for this `model_type`."""
    sizes, kind = config_sizes(config), config.get("model_type")
    if sizes is None or kind not in NORMS:
        return None
    width, queries, inner = sizes.width, sizes.heads * sizes.head_width, sizes.inner_width
    keys = sizes.cached // (2 * sizes.layers)
    block = 2 * width * (queries + keys) + 3 * width * inner + NORMS[kind] * width
    if kind == "qwen2":
        block += queries + 2 * keys
    elif kind not in WITHOUT_BIAS and config.get("attention_bias"):
        block += queries + 2 * keys + width
    if kind in FEED_FORWARD_BIAS and config.get("mlp_bias"):
        block += 2 * inner + width
    if kind in HEAD_NORMS:
        block += 2 * sizes.head_width
    table = sizes.vocab * width
    head = width if not is_language_model else 0 if is_tied(config) else table
    return table + sizes.layers * block + width + head
