"""Packed rows: several sequences concatenated in one row, without padding; no sequence attends to another.

A pass is a `Network.hidden` of [1, T] tokens whose positions restart with each sequence. Only attention needs to know the
boundaries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from oppo_core.models.host_device import to_device

# The variable-length attention kernel supports these dtypes and head widths.
SHORT, WIDEST, WIDTHS = (torch.float16, torch.bfloat16), 256, 8
# Attention of one sequence: query, keys, values [1, heads, T, width], and the window size, the query itself included.
Alone = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of these `lengths` in one row: sequence n starts at `starts_N1`[n].

    `window_sizes`: window size of each layer, the query itself included; None: full attention; empty: full in every layer.
    """

    lengths: tuple[int, ...]
    starts_N1: Tensor  # int32
    window_sizes: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Self:
        """Sequences of `lengths`, in order."""
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), to_device(starts, device))

    def with_windows(self, window_sizes: tuple[int | None, ...]) -> Packed:
        """The same for a network with these window sizes."""
        return replace(self, window_sizes=window_sizes)

    def window_size(self, layer: int) -> int | None:
        """Window size of `layer`; None: full attention."""
        reach = self.window_sizes[layer] if self.window_sizes else None
        return reach if reach is not None and reach < max(self.lengths) else None

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
        """Fused attention [1, heads, T, width]; `keys` and `values` may have fewer heads (grouped-query attention)."""
        kernel = _kernel() if _is_for_kernel(query, values) else None
        reach = self.window_size(layer)
        if kernel is None:
            return self.attend_separately(layer, query, keys, values, lambda q, k, v, r: fused_single(q, k, v, r, scale))
        q, k, v = (x[0].transpose(0, 1) for x in (query, keys, values))
        longest = max(self.lengths)
        window = (-1 if reach is None else reach - 1, 0)
        mixed = kernel(q, k, v, self.starts_N1, self.starts_N1, longest, longest, scale=scale, window_size=window)
        return mixed.transpose(0, 1)[None]

    def attend_separately(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, alone: Alone) -> Tensor:
        """One sequence after another by `alone`, if no kernel handles them together."""
        reach = self.window_size(layer)
        parts = [
            alone(query[:, :, first:end], keys[:, :, first:end], values[:, :, first:end], reach) for first, end in self._bounds()
        ]
        return torch.cat(parts, dim=2)

    def _bounds(self) -> Iterator[tuple[int, int]]:
        return pairwise((0, *accumulate(self.lengths)))


def fused_single(query: Tensor, keys: Tensor, values: Tensor, reach: int | None, scale: float | None) -> Tensor:
    """torch's fused attention of one sequence."""
    groups = query.shape[1] // keys.shape[1]
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    if reach is None or reach >= query.shape[2]:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=seen(query.shape[2], reach, query.device), scale=scale)


def seen(tokens: int, reach: int | None, device: torch.device) -> Tensor:
    """[T, T], True where a query may attend in a single sequence."""
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return causal if reach is None else causal.triu(1 - reach)


def _is_for_kernel(query: Tensor, values: Tensor) -> bool:
    width = query.shape[-1]
    fits = width <= WIDEST and width % WIDTHS == 0 and values.shape[-1] == width
    return query.device.type == "cuda" and query.dtype in SHORT and fits


@cache
def _kernel() -> Callable[..., Tensor] | None:
    """torch's variable-length attention; None if this torch has none with the required features."""
    try:
        varlen: Any = import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    known = inspect.signature(varlen.varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None

    def attention(query: Tensor, keys: Tensor, *given: Any, **named: Any) -> Tensor:
        grouped = {"enable_gqa": True} if "enable_gqa" in known and query.shape[1] != keys.shape[1] else {}
        mixed: Tensor = varlen.varlen_attn(query, keys, *given, **named, **grouped)
        return mixed

    return attention
