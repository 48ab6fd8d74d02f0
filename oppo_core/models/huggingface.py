"""Any decoder-only Hugging Face model as a `Network`, with our slot cache behind transformers' `Cache` interface.

The stock caches cannot advance rows unevenly; ours passes explicit position ids and 4-D masks (one per kind of layer, for models
that mix full and sliding attention). The pooling of sequence classifiers is not used: it selects the rightmost token of the
current ids, which is wrong for chunks.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache

from oppo_core.models import supported
from oppo_core.models.attention import CAPPED, FUSED
from oppo_core.models.cache import CacheShape, CacheWindow
from oppo_core.models.packed import Packed
from oppo_core.models.transformers_cache import PassthroughLayer, WindowLayer, probe_cache_shape
from oppo_core.models.upcast import output_in_float32


class PendingWeights(Protocol):
    """Weights of a network on the meta device, to be read when it has been sharded."""

    @property
    def device(self) -> torch.device:
        """The device to read them to."""

    def read(self, network: HuggingFaceNetwork) -> None:
        """Read this rank's shards. Raises ModelFolderError if weights are missing."""


class HuggingFaceNetwork(nn.Module):
    """A `Network` around a transformers model. `own_head` replaces a head that the folder lacks."""

    def __init__(self, model: Any, own_head: nn.Linear | None) -> None:
        super().__init__()
        self.model: Any = model
        self.own_head = own_head
        self.pending: PendingWeights | None = None
        output_in_float32(own_head or getattr(model, "score", None) or model.get_output_embeddings())
        self.config = config = model.config
        self.context = supported.context_of(config)
        self.width = int(config.hidden_size)
        self.window_sizes = supported.window_sizes(config)
        self.attends_by_band = model.config._attn_implementation in (FUSED, CAPPED)
        self.refuses_packing = "" if self.attends_by_band else "transformers runs it on an attention function that is not ours"
        # torch's fused attention would make an additive mask of a boolean one in every layer.
        self._additive = model.config._attn_implementation in ("eager", FUSED)
        self._logit_rule = supported.logit_rule(config)
        self.name = f"{config.name_or_path} ({config.model_type})"
        self.cache_shape: CacheShape = probe_cache_shape(self.backbone, config.num_hidden_layers, self.name)
        self._passthrough = Cache(layers=[PassthroughLayer() for _ in self.cache_shape.layers])

    @property
    def backbone(self) -> nn.Module:
        """The model without its head."""
        base: nn.Module = self.model if self.own_head is not None else self.model.base_model
        return base

    def hidden(self, tokens_NT: Tensor, positions_NT: Tensor, window: CacheWindow | Packed | None = None) -> Tensor:
        """Last hidden states [N, T, H]."""
        arguments: dict[str, Any] = {"use_cache": False, "past_key_values": self._passthrough}
        if isinstance(window, Packed):
            arguments["window"] = window.with_windows(self._layer_window_sizes())
            arguments["attention_mask"] = self._placeholder_masks(tokens_NT)
        elif window is not None:
            layers = [WindowLayer(window, layer, self.attends_by_band) for layer in range(len(self.cache_shape.layers))]
            masks = self._attention_masks(window)
            arguments = {"use_cache": True, "past_key_values": Cache(layers=layers), "attention_mask": masks}
            if self.attends_by_band:
                arguments["window"] = window
        states: Tensor = self.backbone(input_ids=tokens_NT, position_ids=positions_NT, **arguments).last_hidden_state
        return states

    def _attention_masks(self, window: CacheWindow) -> Tensor | dict[str, Tensor] | None:
        """The `attention_mask` argument for transformers; None for new sequences: it then builds the same masks itself."""
        if window.mask is None:
            return None
        masks = {}
        for kind, size in self.window_sizes.items():
            mask = window.mask_for(size)
            assert mask is not None
            masks[kind] = additive(mask, window.cache.keys[0].dtype) if self._additive else mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _layer_window_sizes(self) -> tuple[int | None, ...]:
        """Window size of each layer; None: full attention."""
        layers = len(self.cache_shape.layers)
        if len(self.window_sizes) == 1:
            return tuple(self.window_sizes.values()) * layers
        return tuple(self.window_sizes[kind] for kind in self.config.layer_types[:layers])

    def _placeholder_masks(self, tokens_1T: Tensor) -> Tensor | dict[str, Tensor]:
        """Unused masks, which keep transformers from allocating masks quadratic in the row length."""
        none = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens_1T.device)
        return dict.fromkeys(self.window_sizes, none) if len(self.window_sizes) > 1 else none

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V]."""
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits if self._logit_rule is None else self._logit_rule(logits)

    def scalar(self, hidden: Tensor) -> Tensor:
        """Value [...] of the classification head's one label, or of our own head."""
        head: Any = self.own_head if self.own_head is not None else self.model.score
        value: Tensor = head(hidden).squeeze(-1)
        return value


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may attend and the dtype's minimum elsewhere, for attention with an additive mask.

    Not -inf: a row without any visible key must stay finite, because its keys and values are cached for later sequences' slots.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
