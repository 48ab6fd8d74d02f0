"""Layers for transformers' `Cache` interface: over the slot KV cache, without a cache, and to probe a model's shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from oppo_contract.model_folder import ModelFolderError
from oppo_core.models.cache import CacheShape, CacheWindow, LayerShape


class PassthroughLayer(CacheLayerMixin):  # type: ignore[misc]
    """Stores nothing: a row attends to its own keys only.

    Without any cache transformers inspects the positions for packed sequences, which synchronizes with the GPU in every pass.
    """

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) of the mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: rows have different lengths, and position ids are explicit."""
        return 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1


class WindowLayer(PassthroughLayer):
    """One layer of an open `CacheWindow`. With `by_band` the attention function reads the window itself."""

    def __init__(self, window: CacheWindow, layer: int, by_band: bool) -> None:
        super().__init__()
        self.window, self.layer, self.by_band = window, layer, by_band
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all visible ones, or the given ones if the attention function reads the window."""
        self.window.store(self.layer, key_states, value_states)
        return (key_states, value_states) if self.by_band else self.window.visible(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.columns, 0

    def get_max_length(self) -> int:
        return self.window.columns


class ShapeLayer(PassthroughLayer):
    """Records the shapes of the keys and values that a layer would store."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: LayerShape | None = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.shape = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states


@torch.no_grad()
def probe_cache_shape(backbone: nn.Module, layers: int, name: str) -> CacheShape:
    """What the model called `name` caches per token, found by a forward pass over one token.

    Raises:
        ModelFolderError: a layer caches no keys and values, or the model does not support such a cache.
    """
    probes = [ShapeLayer() for _ in range(layers)]
    one = torch.zeros(1, 1, dtype=torch.long, device=next(backbone.parameters()).device)
    try:
        backbone(input_ids=one, position_ids=one, past_key_values=Cache(layers=probes), use_cache=True)
    except Exception as error:  # an unknown model may raise anything
        raise ModelFolderError(f"{name} takes no cache of keys and values: {error!r}") from error
    shapes = [probe.shape for probe in probes if probe.shape is not None]
    if len(shapes) < layers:
        raise ModelFolderError(f"{layers - len(shapes)} of the {layers} layers of {name} store no keys and values of their own")
    return CacheShape(tuple(shapes))
