"""Slot KV cache: keys and values of many sequences, each with its own length.

Row s, column j holds position j of the sequence in slot s, so rows advance unevenly, leave and join without moving others.
Columns beyond a row's length hold garbage that no query may see: a query at position p sees columns 0…p, and in a sliding-window
layer of w tokens only p−w+1…p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from oppo_core.models.host_device import to_device


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Cache of one layer per token: `heads` keys of `key_width` numbers, and as many values of `value_width`."""

    heads: int
    key_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class Band:
    """Adjacent rows `start` … `stop`−1, none of which has more than `columns` positions."""

    start: int
    stop: int
    columns: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Cache of a model per token, layer by layer."""

    layers: tuple[LayerShape, ...]

    @classmethod
    def equal(cls, layers: int, heads: int, head_width: int) -> Self:
        """The usual case: all layers, keys and values have the same size."""
        return cls((LayerShape(heads, head_width, head_width),) * layers)

    @property
    def numbers(self) -> int:
        """Numbers cached per token in all layers; times the bytes of one, this is the cost of a token."""
        return sum(layer.heads * (layer.key_width + layer.value_width) for layer in self.layers)


class SlotCache:
    """Keys and values [slots, heads, columns, width] per layer, with dtype and device of `like`."""

    def __init__(self, shape: CacheShape, slots: int, columns: int, like: Tensor) -> None:
        self.keys = [like.new_zeros(slots, layer.heads, columns, layer.key_width) for layer in shape.layers]
        self.values = [like.new_zeros(slots, layer.heads, columns, layer.value_width) for layer in shape.layers]
        self.slots, self.columns = slots, columns

    def window(self, slots: slice | Tensor, positions_NT: Tensor, columns: int, bands: tuple[Band, ...] = ()) -> CacheWindow:
        """Open `slots` (a leading slice, or indices [N]) for tokens at `positions_NT`; `columns` > every position."""
        device = positions_NT.device
        rows_N = torch.arange(slots.stop, device=device) if isinstance(slots, slice) else slots
        mask = torch.arange(columns, device=device)[None, None, :] <= positions_NT[:, :, None]
        return CacheWindow(self, slots, rows_N[:, None], positions_NT, columns, mask[:, None], bands)

    def fresh_window(self, slots: Tensor, width: int) -> CacheWindow:
        """Open `slots` [N] for new sequences: `width` tokens each from position 0, plainly causal."""
        positions_NT = torch.arange(width, device=slots.device).expand(len(slots), width)
        return CacheWindow(self, slots, slots[:, None], positions_NT, width, None)

    def rearrange(self, sources: list[int], targets: list[int], columns: int) -> None:
        """Copy the first `columns` of each slot of `sources` into the slot of `targets`, all at once."""
        device = self.keys[0].device
        given, wanted = to_device(sources, device), to_device(targets, device)
        for store in (*self.keys, *self.values):
            store[wanted, :, :columns] = store[given, :, :columns]

    def move(self, source: int, target: int, columns: int) -> None:
        """Copy the first `columns` of slot `source` over slot `target`, to fill a hole."""
        for store in (*self.keys, *self.values):
            store[target, :, :columns] = store[source, :, :columns]

    def copied(self, slots: list[int], columns: int) -> dict[str, Tensor]:
        """Copies of the first `columns` of `slots` in host memory, for a file.

        Layer by layer: a nearly full GPU has no room for all of them.
        """
        stores = {"keys": self.keys, "values": self.values}
        return {
            f"{kind}.{n}": store[slots, :, :columns].cpu() for kind, layers in stores.items() for n, store in enumerate(layers)
        }

    def restore(self, slots: list[int], copies: dict[str, Tensor]) -> None:
        """Restore the result of `copied`."""
        for name, part in copies.items():
            kind, layer = name.split(".")
            store = (self.keys if kind == "keys" else self.values)[int(layer)]
            store[slots, :, : part.shape[2]] = part.to(store.device)


@dataclass(frozen=True, slots=True)
class CacheWindow:
    """The slots that one forward pass writes and reads.

    `mask` [N, 1, T, columns]: True where a query may attend; None for new sequences, for which plain causal attention over the
    new tokens suffices (half the cost of a mask). `bands` split the rows into neighbours of similar length, for a `Network` that
    `attends_by_band`.
    """

    cache: SlotCache
    slots: slice | Tensor
    rows_N1: Tensor
    positions_NT: Tensor
    columns: int
    mask: Tensor | None
    bands: tuple[Band, ...] = ()

    def mask_for(self, window_size: int | None) -> Tensor | None:
        """`mask` for layers with this sliding window, the query itself included; None: full attention."""
        if self.mask is None or window_size is None or self.columns <= window_size:
            return self.mask
        columns_K = torch.arange(self.columns, device=self.mask.device)
        return self.mask & (columns_K > self.positions_NT[:, :, None] - window_size)[:, None]

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store new keys and values [N, heads, T, width]."""
        self.cache.keys[layer][self.rows_N1, :, self.positions_NT] = keys.transpose(1, 2)
        self.cache.values[layer][self.rows_N1, :, self.positions_NT] = values.transpose(1, 2)

    def stored(self, layer: int, band: Band) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, heads, band.columns, width] of the window's rows in `band`; copies if slots are not adjacent."""
        return self._rows(self.cache.keys[layer], band), self._rows(self.cache.values[layer], band)

    def _rows(self, store: Tensor, band: Band) -> Tensor:
        seen = store[:, :, : band.columns]
        if isinstance(self.slots, slice):
            return seen[band.start : band.stop]
        slots = self.slots[band.start : band.stop]
        # A view, if the slot's number is known on the host; on a GPU reading it would synchronize.
        if len(slots) == 1 and slots.device.type == "cpu":
            return seen[int(slots) :][:1]
        # `index_select` copies whole rows at once; advanced indexing would copy element by element.
        return seen.index_select(0, slots)

    def visible(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All visible keys and values [N, heads, columns, width] after `store` of these, for models that do not use bands."""
        return (keys, values) if self.mask is None else self.stored(layer, Band(0, len(keys), self.columns))
