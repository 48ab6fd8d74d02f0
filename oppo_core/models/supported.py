"""Checks a Hugging Face model's configuration for exact streaming, before its weights are read.

Exact means that chunked prefill with a KV cache gives the result of one forward pass. This holds if a token depends on earlier
tokens through attention only, at explicit positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from oppo_contract.model_folder import ModelFolderError

FULL, SLIDING = "full_attention", "sliding_attention"


def refuse_unsupported(config: PretrainedConfig, path: str) -> None:
    """Raises ModelFolderError with the reason for an unsupported configuration."""
    reason = next((reason for applies, reason in _reasons(config) if applies), None)
    if reason is not None:
        raise ModelFolderError(f"{path} ({config.model_type}) cannot be used: {reason} (docs/models.md)")


def _reasons(config: PretrainedConfig) -> list[tuple[bool, str]]:
    """Pairs of (whether it applies to this model, reason of refusal)."""

    def given(name: str) -> Any:
        return getattr(config, name, None)

    kinds = set(given("layer_types") or [FULL])
    classes = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return [
        (bool(given("is_encoder_decoder")), "it has an encoder; the four roles need decoder-only models"),
        (
            config.get_text_config(decoder=True) is not config,
            "it wraps a text model together with other modalities; save its text part as a folder of its own",
        ),
        (bool(kinds - {FULL, SLIDING}), f"it has layers of kind {', '.join(sorted(kinds - {FULL, SLIDING}))}"),
        (
            "local" in (given("attention_layers") or []),
            "its local layers assume that the last column is the newest token",
        ),
        (bool(given("num_kv_shared_layers")), "some of its layers share the keys and values of others"),
        (bool(given("use_bidirectional_attention")) or given("is_causal") is False, "its attention is not causal"),
        (bool(given("add_cross_attention")), "it has cross-attention"),
        (classes is None, "transformers has no causal language model for this configuration"),
        (
            any(getattr(c, "_is_stateful", False) for c in _as_tuple(classes)),
            "it is recurrent",
        ),
        (
            any(group["rope_type"] == "dynamic" for group in _rope_groups(config)),
            "its rotary frequencies change with the length read (rope_type dynamic)",
        ),
        (
            not given("max_position_embeddings"),
            "its config.json names no max_position_embeddings",
        ),
        (given("quantization_config") is not None, "its weights are quantised; they can neither be trained nor compared exactly"),
    ]


def _as_tuple(classes: Any) -> tuple[Any, ...]:
    return classes if isinstance(classes, tuple) else (classes,)


def _rope_groups(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Settings of a model's rotary positions, by kind of layer where they differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return [group for group in groups if "rope_type" in group]


def context_of(config: PretrainedConfig) -> int:
    """Longest sequence, tokens.

    With rope_type longrope that is the original context: beyond it all rotary frequencies change, those of cached keys too.
    """
    originals = [g["original_max_position_embeddings"] for g in _rope_groups(config) if g["rope_type"] == "longrope"]
    return int(min([config.max_position_embeddings, *originals]))


def window_sizes(config: PretrainedConfig) -> dict[str, int | None]:
    """Window of each kind of attention layer: visible positions per query, itself included; None: all."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and config.model_type != "mistral":  # mistral applies sliding_window to every layer
        return {kind: window if kind == SLIDING else None for kind in sorted(set(kinds))}
    if window is None or not getattr(config, "use_sliding_window", True):
        return {FULL: None}
    return {SLIDING: window}


def logit_rule(config: PretrainedConfig) -> Callable[[Tensor], Tensor] | None:
    """Transformation of the logits after the head; None: none."""
    cap, factor, divisor = (getattr(config, name, None) for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"))
    if cap is not None:
        return lambda logits: torch.tanh(logits / cap) * cap
    if factor is not None:
        return lambda logits: logits * factor
    if divisor is not None:
        return lambda logits: logits / divisor
    return None


def attention_kind(config: PretrainedConfig) -> str:
    """Name of the attention function: torch's fused one, or ours where logits are capped, which the fused one ignores."""
    from oppo_core.models.attention import CAPPED

    return CAPPED if getattr(config, "attn_logit_softcapping", None) is not None else "sdpa"
