"""Our own small transformer: pre-norm, learned positions, GELU, one head.

Written for few, large operations: at these sizes a decode step costs what its Python calls cost. Learned positions are
added once at the bottom, so that attention needs no rotation.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oppo_contract.spec import TinyArchitecture
from oppo_core.models.cache import CacheShape, CacheWindow

Head = Literal["lm", "scalar"]


class Block(nn.Module):
    """Attention and a GELU feed-forward layer, each behind a layer norm, added to the residual stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x_NTH: Tensor, layer: int, window: CacheWindow | None) -> Tensor:
        """One block on [N, T, H]."""
        rows, tokens, hidden = x_NTH.shape
        normed = F.layer_norm(x_NTH, (hidden,), self.norm1.weight, self.norm1.bias)
        qkv = F.linear(normed, self.qkv.weight, self.qkv.bias).view(rows, tokens, 3, self.heads, hidden // self.heads)
        query, keys, values = qkv.permute(2, 0, 3, 1, 4)
        if window is not None:
            keys, values = window.append(layer, keys, values)
        mask = window.mask if window is not None else None
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)
        mixed = mixed.transpose(1, 2).reshape(rows, tokens, hidden)
        x_NTH = x_NTH + F.linear(mixed, self.out.weight, self.out.bias)
        normed = F.layer_norm(x_NTH, (hidden,), self.norm2.weight, self.norm2.bias)
        inner = F.gelu(F.linear(normed, self.up.weight, self.up.bias))
        return x_NTH + F.linear(inner, self.down.weight, self.down.bias)


class TinyTransformer(nn.Module):
    """A `Network`. The language-model head is tied to the embedding; the scalar head is one row and a bias."""

    def __init__(self, architecture: TinyArchitecture, head: Head) -> None:
        super().__init__()
        self.architecture = architecture
        hidden = architecture.hidden
        self.embedding = nn.Embedding(architecture.vocab, hidden)
        self.position = nn.Embedding(architecture.context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, architecture.heads) for _ in range(architecture.layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, 1) if head == "scalar" else None

    @property
    def context(self) -> int:
        """Longest sequence, tokens."""
        return self.architecture.context

    @property
    def cache_shape(self) -> CacheShape:
        """What a slot cache must hold for it."""
        a = self.architecture
        return CacheShape(a.layers, a.heads, a.hidden // a.heads)

    def hidden(self, tokens_NT: Tensor, positions_NT: Tensor, window: CacheWindow | None = None) -> Tensor:
        """Last hidden states [N, T, H], normalised."""
        x = F.embedding(tokens_NT, self.embedding.weight) + F.embedding(positions_NT, self.position.weight)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, window)
        return F.layer_norm(x, (x.shape[-1],), self.norm.weight, self.norm.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V]."""
        return F.linear(hidden, self.embedding.weight)

    def scalar(self, hidden: Tensor) -> Tensor:
        """The scalar head's value [...]. Raises ValueError on a language model."""
        if self.head is None:
            raise ValueError("this model has a language-model head; load it with head='scalar'")
        return F.linear(hidden, self.head.weight, self.head.bias).squeeze(-1)


def init_tiny(architecture: TinyArchitecture, head: Head, seed: int) -> TinyTransformer:
    """A model with fresh weights, the same for the same seed; a scalar head starts at zero."""
    model = TinyTransformer(architecture, head)
    generator = torch.Generator().manual_seed(seed)
    depth_scale = (2 * architecture.layers) ** -0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith("head"):
                weight.zero_()
            elif weight.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                weight.normal_(0.0, 0.02 * (depth_scale if residual else 1.0), generator=generator)
            elif "norm" not in name:
                weight.zero_()
    return model
