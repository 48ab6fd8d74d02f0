"""Slot cache: keys and values of many sequences, each at its own length.

Row s, column j always holds position j of the sequence in slot s, so rows advance unevenly, leave and join without moving
the others. Columns beyond a row's length hold garbage that no query may see: a query at position p sees columns 0…p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model needs stored a token: `layers` × `heads` × `head_dim` keys, and as many values."""

    layers: int
    heads: int
    head_dim: int


class SlotCache:
    """Keys and values [slots, heads, columns, head_dim] a layer."""

    def __init__(self, shape: CacheShape, slots: int, columns: int, like: Tensor) -> None:
        size = (slots, shape.heads, columns, shape.head_dim)
        self.keys = [like.new_zeros(size) for _ in range(shape.layers)]
        self.values = [like.new_zeros(size) for _ in range(shape.layers)]
        self.columns = columns

    def window(self, slots: slice | Tensor, positions_NT: Tensor, columns: int) -> CacheWindow:
        """Open `slots` (a leading slice, or indices [N]) for tokens at `positions_NT`; `columns` > every position."""
        rows_N = torch.arange(slots.stop) if isinstance(slots, slice) else slots
        mask = torch.arange(columns)[None, None, :] <= positions_NT[:, :, None]
        return CacheWindow(self, slots, rows_N[:, None], positions_NT, columns, mask[:, None])

    def fresh_window(self, slots: Tensor, width: int) -> CacheWindow:
        """Open `slots` [N] for sequences that begin: `width` tokens each from position 0, plainly causal."""
        positions_NT = torch.arange(width).expand(len(slots), width)
        return CacheWindow(self, slots, slots[:, None], positions_NT, width, None)

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first `columns` of slot `source` over slot `target`: how a hole is filled when a row leaves."""
        for store in (*self.keys, *self.values):
            store[target, :, :columns] = store[source, :, :columns]


@dataclass(frozen=True, slots=True)
class CacheWindow:
    """The slots that one forward pass writes and reads.

    `mask` [N, 1, T, columns]: True where a query may look; None when rows begin here, so that plain causal attention over
    the new tokens is all there is to see (half the cost of a mask).
    """

    cache: SlotCache
    slots: slice | Tensor
    rows_N1: Tensor
    positions_NT: Tensor
    columns: int
    mask: Tensor | None

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [N, heads, T, head_dim]; return all visible ones [N, heads, columns, head_dim]."""
        stored_keys, stored_values = self.cache.keys[layer], self.cache.values[layer]
        stored_keys[self.rows_N1, :, self.positions_NT] = keys.transpose(1, 2)
        stored_values[self.rows_N1, :, self.positions_NT] = values.transpose(1, 2)
        if self.mask is None:
            return keys, values
        return stored_keys[self.slots, :, : self.columns], stored_values[self.slots, :, : self.columns]
