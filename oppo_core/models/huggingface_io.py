"""Loads and saves Hugging Face models with `from_pretrained` and `save_pretrained`; every loaded model is verified."""

from __future__ import annotations

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
    PretrainedConfig,
    logging,
)

from oppo_contract.model_folder import CLASSIFIER, ModelFolderError
from oppo_core.models import supported
from oppo_core.models.attention import FUSED
from oppo_core.models.fused_activations import fuse_activations
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import Head
from oppo_core.models.verify_streaming import packing_error, verify_streaming

# transformers checks tokens for padding, which would synchronize with the GPU.
PADDING_CHECK = "warn_if_padding_and_no_attention_mask"

# We raise for missing weights, and omit heads deliberately.
logging.set_verbosity_error()
logging.disable_progress_bar()


def load_huggingface(path: str, head: Head, dtype: torch.dtype) -> HuggingFaceNetwork:
    """Load a local folder or a hub id with `from_pretrained`; safetensors only, no remote code.

    Raises:
        ModelFolderError: transformers cannot load it, it cannot be streamed exactly, weights are missing, or a reward model
            does not have exactly one label.
    """
    config = check_config(path, head)
    with _explained(path):
        network = _load(path, config, head, dtype)
    _verify(network)
    return network


def check_config(path: str, head: Head) -> PretrainedConfig:
    """A model's configuration. Raises ModelFolderError when loading would refuse the model because of it."""
    with _explained(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    supported.refuse_unsupported(config, path)
    if head == "lm" and _is_classifier(config):
        raise ModelFolderError(f"{path} is a sequence classifier; the actor and the reference need a causal language model")
    if head == "scalar" and _is_classifier(config) and config.num_labels != 1:
        raise ModelFolderError(f"{path} has {config.num_labels} labels; a reward model has one")
    return config


@contextmanager
def _explained(path: str) -> Iterator[None]:
    """Raises ModelFolderError for an error of transformers."""
    try:
        yield
    except ModelFolderError:
        raise
    except (OSError, ValueError) as error:
        remote = "it needs custom code, which is never run; only models that transformers includes are supported"
        raise ModelFolderError(f"{path} cannot be loaded: {remote if 'trust_remote_code' in str(error) else error}") from error


def _is_classifier(config: PretrainedConfig) -> bool:
    return any(name.endswith(CLASSIFIER) for name in config.architectures or [])


def wrap_model(model: Any) -> HuggingFaceNetwork:
    """Wrap and verify a loaded model that has its own head. Raises ModelFolderError if it cannot be streamed exactly."""
    network = HuggingFaceNetwork(model, None)
    _verify(network)
    return network


def _verify(network: HuggingFaceNetwork) -> None:
    """`verify_streaming`, without bands for a model that changes keys between cache and attention; sets `refuses_packing`."""
    try:
        verify_streaming(network)
    except ModelFolderError:
        if not network.attends_by_band:
            raise
        network.attends_by_band = False
        verify_streaming(network)
    network.refuses_packing = network.refuses_packing or packing_error(network)


def _load(path: str, config: PretrainedConfig, head: Head, dtype: torch.dtype) -> HuggingFaceNetwork:
    if head == "lm":
        return HuggingFaceNetwork(_load_weights(AutoModelForCausalLM, path, config, dtype), None)
    if _is_classifier(config):
        model = _load_weights(AutoModelForSequenceClassification, path, config, dtype)
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ModelFolderError(f"{path} has no linear layer `score`; the head of a {config.model_type} classifier is unknown")
        return HuggingFaceNetwork(model, None)
    own_head = nn.Linear(config.hidden_size, 1).to(dtype)
    nn.init.zeros_(own_head.weight)
    nn.init.zeros_(own_head.bias)
    return HuggingFaceNetwork(_load_weights(AutoModel, path, config, dtype), own_head)


def _load_weights(kind: Any, path: str, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
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
        if hasattr(module, PADDING_CHECK):
            setattr(module, PADDING_CHECK, _no_padding_check)
    loaded: nn.Module = model.eval()
    return loaded


def _no_padding_check(*_: Tensor | None) -> None:
    """Does nothing: rows are right-padded beyond their end, where nothing is read."""


def export_huggingface(network: nn.Module, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write `weights` as a folder that `from_pretrained` reads, without a tokenizer."""
    assert isinstance(network, HuggingFaceNetwork)
    with without_deepspeed_import():
        network.model.save_pretrained(folder, state_dict=weights)


@contextmanager
def without_deepspeed_import() -> Iterator[None]:
    """Keeps `save_pretrained` from importing DeepSpeed, to check for its engines: that takes seconds and prints to stdout."""
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


def restore_huggingface(network: Network, folder: Path) -> None:
    """Restore the result of `export_huggingface`."""
    assert isinstance(network, HuggingFaceNetwork)
    saved: Any = type(network.model)
    network.model.load_state_dict(saved.from_pretrained(folder, dtype=next(network.parameters()).dtype).state_dict())
