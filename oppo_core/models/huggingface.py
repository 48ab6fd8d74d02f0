"""Any decoder-only Hugging Face model as a `Network`, with our slot cache behind transformers' `Cache` interface.

The stock caches cannot advance rows unevenly. Ours gives each layer the keys of the open window, with explicit position ids and
4-D
masks (one per kind of layer, for models that mix full and sliding attention). The pooling of sequence classifiers is not used: it
selects the rightmost token of the current ids, which is wrong for chunks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    logging,
)
from transformers.cache_utils import CacheLayerMixin

from oppo_contract.model_folder import ModelFolderError
from oppo_core.models import supported
from oppo_core.models.attention import CAPPED, FUSED
from oppo_core.models.cache import CacheShape, CacheWindow
from oppo_core.models.fused_activations import fuse_activations
from oppo_core.models.packed import Packed
from oppo_core.models.passthrough_cache import WholeLayer
from oppo_core.models.tiny_transformer import Head
from oppo_core.models.verify_streaming import cache_shape, packed_apart, verify_streaming

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


# transformers checks tokens for padding, which would synchronize with the GPU.
ASKS = "warn_if_padding_and_no_attention_mask"

# We raise for missing weights, and omit heads deliberately.
logging.set_verbosity_error()
logging.disable_progress_bar()


class WindowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of an open `CacheWindow`. With `by_band` the attention function reads the window itself."""

    def __init__(self, window: CacheWindow, layer: int, by_band: bool) -> None:
        super().__init__()
        self.window = window
        self.layer = layer
        self.by_band = by_band
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The slot cache is already allocated."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all visible ones, or the given ones if the attention function reads the window."""
        if self.by_band:
            self.window.store(self.layer, key_states, value_states)
            return key_states, value_states
        return self.window.append(self.layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) of the mask: given, or plainly causal for new sequences."""
        return self.window.columns, 0

    def get_seq_length(self) -> int:
        """0: rows have different lengths, and position ids are explicit."""
        return 0

    def get_max_length(self) -> int:
        """Columns of the window."""
        return self.window.columns


class HuggingNetwork(nn.Module):
    """A `Network` around a transformers model. `own_head` replaces a head that the folder lacks."""

    def __init__(self, model: Any, own_head: nn.Linear | None) -> None:
        super().__init__()
        self.model: Any = model
        self.own_head = own_head
        self.config = config = model.config
        self.context = supported.context_of(config)
        self.width = int(config.hidden_size)
        self.window_sizes = supported.window_sizes(config)
        self.attends_by_band = model.config._attn_implementation in (FUSED, CAPPED)
        self.refuses_packing = "" if self.attends_by_band else "transformers runs it on an attention function that is not ours"
        self._additive = model.config._attn_implementation == "eager"
        self._logit_rule = supported.logit_rule(config)
        self.name = f"{config.name_or_path} ({config.model_type})"
        self.cache_shape: CacheShape = cache_shape(self.backbone, config.num_hidden_layers, self.name)
        self._whole = Cache(layers=[WholeLayer() for _ in self.cache_shape.layers])

    @property
    def backbone(self) -> nn.Module:
        """The model without its head."""
        base: nn.Module = self.model if self.own_head is not None else self.model.base_model
        return base

    def hidden(self, tokens_NT: Tensor, positions_NT: Tensor, window: CacheWindow | Packed | None = None) -> Tensor:
        """Last hidden states [N, T, H]."""
        given: dict[str, Any] = {"use_cache": False, "past_key_values": self._whole}
        if isinstance(window, Packed):
            given |= {"window": window.with_windows(self._window_sizes()), "attention_mask": self._no_masks(tokens_NT)}
        elif window is not None:
            layers = [WindowLayer(window, layer, self.attends_by_band) for layer in range(len(self.cache_shape.layers))]
            given = {"use_cache": True, "past_key_values": Cache(layers=layers), "attention_mask": self._masks(window)}
            if self.attends_by_band:
                given["window"] = window
        states: Tensor = self.backbone(input_ids=tokens_NT, position_ids=positions_NT, **given).last_hidden_state
        return states

    def _masks(self, window: CacheWindow) -> Tensor | dict[str, Tensor] | None:
        """The `attention_mask` argument for transformers; None for new sequences: it then builds the same masks itself."""
        if window.mask is None:
            return None
        masks = {}
        for kind, reach in self.window_sizes.items():
            mask = window.with_windows(reach)
            assert mask is not None
            masks[kind] = _additive(mask, self.model.dtype) if self._additive else mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _window_sizes(self) -> tuple[int | None, ...]:
        """Window size of each layer; None: full attention."""
        layers = len(self.cache_shape.layers)
        if len(self.window_sizes) == 1:
            return tuple(self.window_sizes.values()) * layers
        return tuple(self.window_sizes[kind] for kind in self.config.layer_types[:layers])

    def _no_masks(self, tokens_1T: Tensor) -> Tensor | dict[str, Tensor]:
        """Placeholder masks, which keep transformers from allocating masks quadratic in the row length."""
        none = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=tokens_1T.device)
        return dict.fromkeys(self.window_sizes, none) if len(self.window_sizes) > 1 else none

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits [..., V]."""
        model: Any = self.model
        logits: Tensor = model.get_output_embeddings()(hidden)
        return logits if self._logit_rule is None else self._logit_rule(logits)

    def scalar(self, hidden: Tensor) -> Tensor:
        """Value [...] of the classification head's one label, or of our own head."""
        head: Any = self.own_head if self.own_head is not None else self.model.score
        value: Tensor = head(hidden).squeeze(-1)
        return value


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query may attend and the dtype's minimum elsewhere, for attention with an additive mask."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def load_hugging(path: str, head: Head, dtype: torch.dtype) -> HuggingNetwork:
    """Load a local folder or a hub id with `from_pretrained`; safetensors only, no remote code.

    Raises:
        ModelFolderError: transformers cannot load it, it cannot be streamed exactly, weights are missing, or a reward
        model has
            other than one label.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        supported.refuse_unsupported(config, path)
        network = _load(path, config, head, dtype)
    except (OSError, ValueError) as error:
        if isinstance(error, ModelFolderError):
            raise
        remote = "trust_remote_code" in str(error)
        reason = (
            "it needs program code of its own, which is never run; only models that transformers knows are" if remote else error
        )
        raise ModelFolderError(f"{path} cannot be loaded: {reason}") from error
    _verify(network)
    return network


def wrap_network(model: Any) -> HuggingNetwork:
    """Wrap a loaded model that has its own head, after verifying that reading in chunks equals one pass.

    Raises:
        ModelFolderError: it does not.
    """
    network = HuggingNetwork(model, None)
    _verify(network)
    return network


def _verify(network: HuggingNetwork) -> None:
    """`verify_streaming`; a model that changes keys between cache and attention is read without bands.

    Also finds out whether it can be packed.
    """
    try:
        verify_streaming(network)
    except ModelFolderError:
        if not network.attends_by_band:
            raise
        network.attends_by_band = False
        verify_streaming(network)
    network.refuses_packing = network.refuses_packing or packed_apart(network)


def _load(path: str, config: PretrainedConfig, head: Head, dtype: torch.dtype) -> HuggingNetwork:
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    if head == "lm" and classifies:
        raise ModelFolderError(f"{path} is a sequence classifier; the actor and the reference need a causal language model")
    if head == "lm":
        return HuggingNetwork(_weights(AutoModelForCausalLM, path, config, dtype), None)
    if classifies:
        if config.num_labels != 1:
            raise ModelFolderError(f"{path} has {config.num_labels} labels; a reward model has one")
        model = _weights(AutoModelForSequenceClassification, path, config, dtype)
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ModelFolderError(f"{path} has no linear layer `score`; the head of a {config.model_type} classifier is unknown")
        return HuggingNetwork(model, None)
    own_head = nn.Linear(config.hidden_size, 1).to(dtype)
    nn.init.zeros_(own_head.weight)
    nn.init.zeros_(own_head.bias)
    return HuggingNetwork(_weights(AutoModel, path, config, dtype), own_head)


def _weights(kind: Any, path: str, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """A model with every weight from the folder; transformers would initialise missing ones randomly."""
    attention = supported.attention_kind(config)
    given = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": False, "output_loading_info": True}
    if dtype == torch.float64:
        given["experts_implementation"] = "eager"  # the fused products of a mixture of experts have no float64
    try:
        model, loading_info = kind.from_pretrained(path, attn_implementation=attention, **given)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model, loading_info = kind.from_pretrained(path, attn_implementation="eager", **given)
    if loading_info["missing_keys"]:
        missing = ", ".join(sorted(loading_info["missing_keys"])[:5])
        raise ModelFolderError(f"{path} lacks the weights {missing}")
    if attention == "sdpa" and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(FUSED)  # does not change a model without an exchangeable attention function
    fuse_activations(model)
    for module in model.modules():
        if hasattr(module, ASKS):
            setattr(module, ASKS, _silence_padding_warning)
    loaded: nn.Module = model.eval()
    return loaded


def _silence_padding_warning(*_: Tensor | None) -> None:
    """Rows are right-padded beyond their end, where nothing is read: transformers' warning does not apply."""


def export_hugging(network: HuggingNetwork, folder: Path, source: Path | None, weights: dict[str, Tensor]) -> None:
    """Write `weights` as a folder that `from_pretrained` reads, with the tokenizer of `source`."""
    model: Any = network.model
    with without_deepspeed_import():
        model.save_pretrained(folder, state_dict=weights)
    for name in TOKENIZER_FILES:
        if source is not None and (source / name).exists():
            shutil.copyfile(source / name, folder / name)


@contextmanager
def without_deepspeed_import() -> Iterator[None]:
    """Within it, saving a model does not import DeepSpeed if it is installed, which takes seconds and prints a line.

    accelerate checks whether a model is a DeepSpeed engine; ours never is.
    """
    try:
        from accelerate.utils import imports, other
    except ImportError:  # then transformers skips the check
        yield
        return
    other.is_deepspeed_available = lambda: False
    try:
        yield
    finally:
        other.is_deepspeed_available = imports.is_deepspeed_available


def restore_hugging(network: HuggingNetwork, folder: Path) -> None:
    """Restore the result of `export_hugging`."""
    saved: Any = type(network.model)
    network.model.load_state_dict(saved.from_pretrained(folder, dtype=next(network.parameters()).dtype).state_dict())
