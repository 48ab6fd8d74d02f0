"""Attention functions for transformers models: torch's fused one, and one with capped logits for Gemma 2.

Both are registered with transformers, which passes the backbone's arguments on. With a `window` they attend to the slot cache,
band by band, or in a packed row to the same sequence; without one to the keys of the pass. torch's fused attention has no cap,
and transformers' plain one rounds weights to float32 for any dtype; ours keeps the model's precision (float32 at least).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oppo_core.models.banded_attention import attend_by_band, fused
from oppo_core.models.cache import CacheWindow
from oppo_core.models.packed import Packed, seen

FUSED, CAPPED = "oppo_sdpa", "oppo_capped"


def fused_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    window: CacheWindow | Packed | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [N, heads, T, D] over `key` and `value` [N, kv heads, T, D], or over the cached ones of `window`.

    `attention_mask` [N, 1, T, K] is True where a query may attend, or is added to the logits; None: causal.

    Returns:
        The mixed values [N, T, heads, D], and no weights.
    """
    if isinstance(window, Packed):
        return window.attend(_layer(module), query, key, value, scaling).transpose(1, 2), None
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        attention_mask = attention_mask.to(query.dtype)  # some models round queries later than keys
    if window is None or window.mask is None or attention_mask is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
        return whole
    mixed = attend_by_band(window, _layer(module), query, attention_mask, partial(fused, scale=scaling))
    return mixed.transpose(1, 2), None


def capped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    window: CacheWindow | Packed | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The same with logits capped at `softcap`."""
    attention = partial(_capped, scale=scaling or query.shape[-1] ** -0.5, cap=softcap)
    if isinstance(window, Packed):

        def alone(query: Tensor, key: Tensor, value: Tensor, reach: int | None) -> Tensor:
            return attention(query, key, value, seen(query.shape[2], reach, query.device))

        mixed = window.attend_separately(_layer(module), query, key, value, alone)
    elif window is not None and window.mask is not None and attention_mask is not None:
        mixed = attend_by_band(window, _layer(module), query, attention_mask, attention)
    else:
        if attention_mask is None:
            attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        mixed = attention(query, key, value, attention_mask)
    return mixed.transpose(1, 2), None


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, cap: float | None) -> Tensor:
    rows, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    grouped = query.reshape(rows, key.shape[1], groups * tokens, width)
    logits = (grouped @ key.transpose(2, 3)).view(rows, heads, tokens, -1) * scale
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    # Not -inf: a padding row without any visible key must stay finite.
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    precise = torch.promote_types(logits.dtype, torch.float32)
    weights = torch.softmax(logits, dim=-1, dtype=precise).to(query.dtype)
    return (weights.view(rows, key.shape[1], groups * tokens, -1) @ value).view(rows, heads, tokens, -1)


def _layer(module: nn.Module) -> int:
    """Index of this attention's layer."""
    layer: Any = module.layer_idx
    return int(layer)


for _name, _function in ((FUSED, fused_attention), (CAPPED, capped_attention)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, sdpa_mask)
