"""Attention with capped logits, as Gemma 2 has it.

torch's fused attention has no cap, and transformers' plain one rounds the weights to float32, whatever the model's type. So
this one is registered with transformers: the cap of the model, the precision of its weights (float32 at least).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

CAPPED = "oppo_capped"


def capped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [N, heads, T, D] over `key` and `value` [N, kv heads, K, D].

    `attention_mask` [N, 1, T, K] is True where a query may look; None: T = K and each sees itself and what is before it.

    Returns:
        The mixed values [N, T, heads, D], and no weights.
    """
    rows, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    grouped = query.reshape(rows, key.shape[1], groups * tokens, width)
    logits = (grouped @ key.transpose(2, 3)).view(rows, heads, tokens, -1) * (scaling or width**-0.5)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if attention_mask is None:
        attention_mask = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=query.device).tril()
    # Not -inf: a row of padding that sees nothing must stay finite.
    logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    precise = torch.promote_types(logits.dtype, torch.float32)
    weights = torch.softmax(logits, dim=-1, dtype=precise).to(query.dtype)
    mixed = (weights.view(rows, key.shape[1], groups * tokens, -1) @ value).view(rows, heads, tokens, -1)
    return mixed.transpose(1, 2), None


AttentionInterface.register(CAPPED, capped_attention)
AttentionMaskInterface.register(CAPPED, sdpa_mask)
