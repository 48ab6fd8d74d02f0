"""Any decoder-only Hugging Face model as a `Network`, with our slot cache behind transformers' `Cache` interface.

The stock caches cannot advance rows unevenly. Ours tells each layer the keys of the open window, and the explicit
position ids and the 4-D mask do the rest. A sequence-classification head's own pooling is not used: it looks at the
rightmost token of the present ids, which is wrong for chunks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Cache,
    PretrainedConfig,
)
from transformers.cache_utils import CacheLayerMixin

from oppo_core.models.cache import CacheShape, CacheWindow
from oppo_core.models.errors import ModelFolderError
from oppo_core.models.tiny import Head

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


class WindowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of an open `CacheWindow`."""

    def __init__(self, window: CacheWindow, layer: int) -> None:
        super().__init__()
        self.window = window
        self.layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the slot cache is allocated beforehand."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values, return all visible ones."""
        return self.window.append(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) of the mask that we hand over ready-made."""
        return self.window.columns, 0

    def get_seq_length(self) -> int:
        """0: rows have different lengths, and position ids are explicit."""
        return 0

    def get_max_length(self) -> int:
        """Columns of the window."""
        return self.window.columns


class HuggingNetwork(nn.Module):
    """A `Network` around a transformers model. `own_head` replaces a head that the folder does not have."""

    def __init__(self, model: nn.Module, config: PretrainedConfig, own_head: nn.Linear | None) -> None:
        super().__init__()
        self.model = model
        self.own_head = own_head
        self.config = config

    @property
    def context(self) -> int:
        """Longest sequence, tokens: the model's context, or its attention window where that is shorter."""
        window = getattr(self.config, "sliding_window", None) if _uses_window(self.config) else None
        return int(min(self.config.max_position_embeddings, window or self.config.max_position_embeddings))

    @property
    def cache_shape(self) -> CacheShape:
        """What a slot cache must hold for it."""
        c = self.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        return CacheShape(c.num_hidden_layers, heads, getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)

    def hidden(self, tokens_NT: Tensor, positions_NT: Tensor, window: CacheWindow | None = None) -> Tensor:
        """Last hidden states [N, T, H]."""
        given: dict[str, Any] = {"use_cache": False}
        if window is not None:
            layers = [WindowLayer(window, layer) for layer in range(self.cache_shape.layers)]
            given = {"use_cache": True, "past_key_values": Cache(layers=layers), "attention_mask": window.mask}
        backbone: Any = self.model if self.own_head is not None else self.model.base_model
        states: Tensor = backbone(input_ids=tokens_NT, position_ids=positions_NT, **given).last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V]."""
        model: Any = self.model
        logits: Tensor = model.get_output_embeddings()(hidden)
        return logits

    def scalar(self, hidden: Tensor) -> Tensor:
        """The classification head's one label, or our own head's value [...]."""
        head: Any = self.own_head if self.own_head is not None else self.model.score
        value: Tensor = head(hidden).squeeze(-1)
        return value


def load_hugging(path: str, head: Head, dtype: torch.dtype) -> HuggingNetwork:
    """A local folder or a hub id through `from_pretrained`; safetensors only, no remote code.

    Raises:
        ModelFolderError: transformers cannot load it, or it has not the one label that a reward model needs.
    """
    given = {"dtype": dtype, "attn_implementation": "sdpa", "use_safetensors": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(path)
        classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
        if head == "lm" and classifies:
            raise ModelFolderError(f"{path} is a sequence classifier; the actor and the reference need a causal language model")
        if head == "lm":
            return HuggingNetwork(AutoModelForCausalLM.from_pretrained(path, **given).eval(), config, None)
        if classifies:
            if config.num_labels != 1:
                raise ModelFolderError(f"{path} has {config.num_labels} labels; a reward model has one")
            return HuggingNetwork(AutoModelForSequenceClassification.from_pretrained(path, **given).eval(), config, None)
        own_head = nn.Linear(config.hidden_size, 1).to(dtype)
        nn.init.zeros_(own_head.weight)
        nn.init.zeros_(own_head.bias)
        return HuggingNetwork(AutoModel.from_pretrained(path, **given).eval(), config, own_head)
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFolderError):
            raise
        raise ModelFolderError(f"{path} cannot be loaded: {error}") from error


def export_hugging(network: HuggingNetwork, folder: Path, source: Path | None) -> None:
    """Write a folder that `from_pretrained` reads, with the tokenizer of `source`."""
    model: Any = network.model
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if source is not None and (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def restore_hugging(network: HuggingNetwork, folder: Path) -> None:
    """Take back what `export_hugging` wrote."""
    saved: Any = type(network.model)
    network.model.load_state_dict(saved.from_pretrained(folder, dtype=next(network.parameters()).dtype).state_dict())


def _uses_window(config: PretrainedConfig) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds
    return bool(getattr(config, "use_sliding_window", getattr(config, "sliding_window", None)))
