"""Attention over a slot cache, band by band.

Rows of very different length share a pass. One call per band of rows of similar length costs less than attending to the longest
row's columns for all, and the keys of adjacent slots need no copy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_core.models.cache import Band, CacheWindow

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend_by_band(window: CacheWindow, layer: int, query: Tensor, mask: Tensor, attention: Attention) -> Tensor:
    """Attention [N, heads, T, width] of `query` over the cached keys of `layer`, in each of the window's bands separately.

    `mask` [N, 1, T, columns] is True where a query may attend, or added to the logits; `attention` takes one band's query, keys,
    values and mask.
    """
    parts = []
    for band in window.bands or (Band(0, len(query), window.columns),):
        keys, values = window.stored(layer, band)
        parts.append(attention(query[band.start : band.stop], keys, values, mask[band.start : band.stop, :, :, : band.columns]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """torch's fused attention [N, heads, T, width]; `keys` and `values` may have fewer heads (grouped-query attention).

    Queries that share keys are concatenated, so that keys need not be repeated.
    """
    rows, heads, tokens, width = query.shape
    groups = heads // keys.shape[1]
    if groups == 1:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    stacked = query.reshape(rows, keys.shape[1], groups * tokens, width)
    repeated = mask if tokens == 1 else mask.repeat(1, 1, groups, 1)
    mixed = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=repeated, scale=scale)
    return mixed.reshape(rows, heads, tokens, values.shape[-1])  # not a view: a GPU's kernels return other strides
