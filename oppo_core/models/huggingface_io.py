"""Loads and saves Hugging Face models with `from_pretrained` and `save_pretrained`; every loaded model is verified."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
)
from transformers import logging as transformers_logging
from transformers.distributed import DistributedConfig

from oppo_contract.model_folder import CLASSIFIER, ModelFolderError
from oppo_core.models import supported
from oppo_core.models.attention import FUSED
from oppo_core.models.fused_modules import fuse_modules
from oppo_core.models.huggingface import HuggingFaceNetwork
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import Head
from oppo_core.models.verify_streaming import packing_error, verify_streaming

# transformers checks tokens for padding, which would synchronize with the GPU.
PADDING_CHECK = "warn_if_padding_and_no_attention_mask"
CPU = torch.device("cpu")
LOG = logging.getLogger(__name__)
# We raise for missing weights, and omit heads deliberately.
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


def load_huggingface(path: str, head: Head, dtype: torch.dtype) -> HuggingFaceNetwork:
    """Load a local folder or a hub id with `from_pretrained`; safetensors only, no remote code.

    Raises:
        ModelFolderError: transformers cannot load it, it cannot be streamed exactly, weights are missing, or a reward model
            does not have exactly one label.
    """
    config = check_config(path, head)
    with _explained(path):
        model = _load_weights(_kind(config, head), path, config, dtype)
    network = _wrap(_prepare(model), path, config, head, dtype)
    _verify(network)
    return network


def build_on_meta(path: str, head: Head, dtype: torch.dtype, device: torch.device) -> HuggingFaceNetwork:
    """A network without weights, for one that is sharded over the ranks: `pending` then reads this rank's shards to `device`.

    A copy of its first layers with random weights is verified instead of it. A forward pass on the meta
    device must be possible; a model for which it is not, such as a mixture of experts, is loaded whole by `load_huggingface`.

    Raises:
        ModelFolderError: as `load_huggingface`; missing weights are noticed when they are read.
    """
    config = check_config(path, head)
    kind = _kind(config, head)
    with _explained(path):
        try:
            with torch.device("meta"):
                model = _prepare(_build(kind, config, dtype))
            network = _wrap(model, path, config, head, dtype, device)
        except (ModelFolderError, RuntimeError) as error:
            LOG.warning("%s is loaded whole and then sharded: %s", path, error)
            return load_huggingface(path, head, dtype).to(device)
        few = _first_layers(config)
        with torch.random.fork_rng(devices=[]):
            sample = _wrap(_prepare(_build(kind, few, dtype)), path, few, head, dtype)
    _verify(sample)
    network.attends_by_band, network.refuses_packing = sample.attends_by_band, sample.refuses_packing
    network.pending = FolderWeights(path, config, dtype, device)
    return network


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """Weights of a folder or a hub id: `PendingWeights`."""

    path: str
    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device

    def read(self, network: HuggingFaceNetwork) -> None:
        plain: Any = type(network.model)

        def sharded(*_: Any) -> Any:
            return network.model

        # Transformers calls this to shard the model that it has built without weights, and then reads each weight's local part.
        hook = {"__module__": plain.__module__, "maybe_distribute_model": classmethod(sharded)}
        kind = type(plain.__name__, (plain,), hook)
        with _explained(self.path):
            # A `device_map` would make transformers allocate the whole model first. Shards go to the device of their mesh.
            _load_weights(kind, self.path, self.config, self.dtype, distributed_config=DistributedConfig())
        if self.device.type != "cpu":
            network.model.to(self.device)  # its buffers
        network.pending = None


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


def _kind(config: PretrainedConfig, head: Head) -> Any:
    """The class of transformers that loads a model for this head."""
    if head == "lm":
        return AutoModelForCausalLM
    return AutoModelForSequenceClassification if _is_classifier(config) else AutoModel


def _load_weights(kind: Any, path: str, config: PretrainedConfig, dtype: torch.dtype, **more: Any) -> nn.Module:
    """A model with every weight from the folder; transformers would initialise missing ones randomly."""
    given = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True} | more
    model, loading_info = _with_attention(kind.from_pretrained, path, config, dtype, **given)
    if loading_info["missing_keys"]:
        missing = ", ".join(sorted(loading_info["missing_keys"])[:5])
        raise ModelFolderError(f"{path} lacks the weights {missing}")
    loaded: nn.Module = model
    return loaded


def _build(kind: Any, config: PretrainedConfig, dtype: torch.dtype) -> nn.Module:
    """A model with random weights."""
    model: nn.Module = _with_attention(kind.from_config, copy.deepcopy(config), config, dtype)
    return model


def _with_attention(make: Any, source: Any, config: PretrainedConfig, dtype: torch.dtype, **given: Any) -> Any:
    """`make(source)` with torch's attention function, or with transformers' own where the model has no other."""
    given["dtype"] = dtype
    if dtype == torch.float64:
        given["experts_implementation"] = "eager"  # the fused products of a mixture of experts have no float64
    try:
        return make(source, attn_implementation=supported.attention_kind(config), **given)
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return make(source, attn_implementation="eager", **given)


def _prepare(model: Any) -> Any:
    """The model in evaluation mode, with our attention function and fused modules where it can have them."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(FUSED)  # does not change a model without an exchangeable attention function
    fuse_modules(model)
    for module in model.modules():
        if hasattr(module, PADDING_CHECK):
            setattr(module, PADDING_CHECK, _no_padding_check)
    return model.eval()


def _wrap(
    model: Any, path: str, config: PretrainedConfig, head: Head, dtype: torch.dtype, device: torch.device = CPU
) -> HuggingFaceNetwork:
    """The model as a network, with a scalar head on `device` that starts at zero where it needs one and has none."""
    if head == "lm":
        return HuggingFaceNetwork(model, None)
    if _is_classifier(config):
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise ModelFolderError(f"{path} has no linear layer `score`; the head of a {config.model_type} classifier is unknown")
        return HuggingFaceNetwork(model, None)
    own_head = nn.Linear(config.hidden_size, 1, dtype=dtype, device=device)
    nn.init.zeros_(own_head.weight)
    nn.init.zeros_(own_head.bias)
    return HuggingFaceNetwork(model, own_head)


def _first_layers(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with the fewest layers that show every kind of attention layer, at least two."""
    few, kinds = copy.deepcopy(config), getattr(config, "layer_types", None)
    count = 2 if kinds is None else max(2, *(1 + kinds.index(kind) for kind in set(kinds)))
    few.num_hidden_layers = min(count, config.num_hidden_layers)
    if kinds is not None:
        few.layer_types = kinds[: few.num_hidden_layers]
    return few


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
