"""Built-in small transformer: pre-norm, learned positions, GELU, one head.

It uses few, large operations, because at these sizes the Python calls dominate a decode step. Learned positions are added once at
the bottom, so attention needs no rotation.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oppo_contract.spec import TinyArchitecture
from oppo_core.models.banded_attention import attend_by_band, fused
from oppo_core.models.cache import CacheShape, CacheWindow
from oppo_core.models.packed import Packed
from oppo_core.models.upcast import linear_in_float32

Head = Literal["lm", "scalar"]


def attend(query: Tensor, keys: Tensor, values: Tensor, window: CacheWindow | Packed | None, layer: int) -> Tensor:
    """Attention [N, heads, T, width]: causal over whole rows, or over the columns that `window` makes visible to each query.

    `keys` and `values` are those of the same tokens; a window caches them.
    """
    if isinstance(window, Packed):
        return window.attend(layer, query, keys, values)
    if window is not None:
        window.store(layer, keys, values)
        if window.mask is not None:
            return attend_by_band(window, layer, query, window.mask, fused)
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True)


class Block(nn.Module):
    """Attention and a GELU feed-forward layer, each after a layer norm, added to the residual stream.

    Linear layers' `forward` is called without their hooks: calling the module would cost as much again as a small product.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x_NTH: Tensor, layer: int, window: CacheWindow | Packed | None) -> Tensor:
        """One block on [N, T, H]."""
        rows, tokens, hidden = x_NTH.shape
        normed = F.layer_norm(x_NTH, (hidden,), self.norm1.weight, self.norm1.bias)
        qkv = self.qkv.forward(normed).view(rows, tokens, 3, self.heads, hidden // self.heads)
        query, keys, values = qkv.permute(2, 0, 3, 1, 4)
        mixed = attend(query, keys, values, window, layer)
        mixed = mixed.transpose(1, 2).reshape(rows, tokens, hidden)
        x_NTH = x_NTH + self.out.forward(mixed)
        normed = F.layer_norm(x_NTH, (hidden,), self.norm2.weight, self.norm2.bias)
        inner = F.gelu(self.up.forward(normed))
        return x_NTH + self.down.forward(inner)


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

    attends_by_band = True
    refuses_packing = ""

    @property
    def context(self) -> int:
        """Longest sequence, tokens."""
        return self.architecture.context

    @property
    def width(self) -> int:
        """Hidden width H."""
        return self.architecture.hidden

    @property
    def cache_shape(self) -> CacheShape:
        """Shape of its KV cache."""
        a = self.architecture
        return CacheShape.equal(a.layers, a.heads, a.hidden // a.heads)

    def hidden(self, tokens_NT: Tensor, positions_NT: Tensor, window: CacheWindow | Packed | None = None) -> Tensor:
        """Last hidden states [N, T, H], normalised."""
        x = F.embedding(tokens_NT, self.embedding.weight) + F.embedding(positions_NT, self.position.weight)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, window)
        return F.layer_norm(x, (x.shape[-1],), self.norm.weight, self.norm.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V]."""
        return linear_in_float32(hidden, self.embedding.weight)

    def scalar(self, hidden: Tensor) -> Tensor:
        """The scalar head's value [...]. Raises ValueError on a language model."""
        if self.head is None:
            raise ValueError("this model has a language-model head; load it with head='scalar'")
        return linear_in_float32(hidden, self.head.weight, self.head.bias).squeeze(-1)


def init_tiny(architecture: TinyArchitecture, head: Head, seed: int) -> TinyTransformer:
    """A model with random weights, a function of the seed; the scalar head starts at zero."""
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
