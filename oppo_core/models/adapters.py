"""Low-rank adapters (LoRA, arXiv 2106.09685) on any of our networks: W·x becomes W·x + (alpha ÷ rank)·B·A·x with a frozen W.

`peft` adds them beside the linear layers. B starts at zero, so an adapted network starts as the plain one. A checkpoint holds the
adapters and the scalar head; the frozen weights are loaded from their source, and a digest checks that they are the same. Live
weights are never merged: W + B·A rounds, and subtracting B·A would not restore W.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.sections.models import Lora
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import TinyTransformer

HEADS = ("head.", "own_head.", "model.score.")  # ours, ours beside a Hugging Face backbone, a classifier's own
DIGEST = "frozen_digest"
ADAPTER = "default"  # peft's name for the first one


def inject_lora(network: nn.Module, lora: Lora, seed: int) -> None:
    """Add adapters to the layers that `lora` names, and freeze everything else but a scalar head.

    The first factor A is drawn from `seed` in the order of the layers; the second, B, is zero.

    Raises:
        ModelFolderError: a target is no linear layer of a block.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds to import, and few runs need it
    from transformers.pytorch_utils import Conv1D

    body = _saved_module(network)
    chosen = _target_layers(linear_layers(body), lora.targets)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen, lora_dropout=0.0, bias="none",
        fan_in_fan_out=any(isinstance(body.get_submodule(name), Conv1D) for name in chosen),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, body)
    for name, weight in network.named_parameters():
        weight.requires_grad_("lora_" in name or name.startswith(HEADS))
    _init_adapters(network, seed)
    if isinstance(network, TinyTransformer):
        network.call_layers()
    network.register_buffer(DIGEST, _frozen_digest(network), persistent=False)


def has_lora(network: object) -> bool:
    """Whether `inject_lora` was called on it."""
    return hasattr(network, DIGEST)


def linear_layers(body: nn.Module) -> list[str]:
    """Names of the linear layers in a model's blocks, without embeddings and heads."""
    from transformers.pytorch_utils import Conv1D

    return [
        name
        for name, module in body.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and any(part.isdigit() for part in name.split("."))
    ]


def trained_weights(network: Network) -> dict[str, Tensor]:
    """Weights for a checkpoint: all; of an adapted network the trained ones and the digest of the others."""
    if not has_lora(network):
        return dict(network.state_dict())
    assert isinstance(network, nn.Module)
    return {DIGEST: network.get_buffer(DIGEST), **_trained(network)}


@torch.no_grad()
def load_trained_weights(network: Network, weights: dict[str, Tensor]) -> None:
    """Restore the result of `trained_weights`.

    Raises:
        ModelFolderError: the frozen weights differ from those with which the adapters were trained.
    """
    if not has_lora(network):
        network.load_state_dict(weights)
        return
    assert isinstance(network, nn.Module)
    if DIGEST not in weights or not torch.equal(weights[DIGEST], network.get_buffer(DIGEST).cpu()):
        raise ModelFolderError("the frozen weights have changed since the adapters were saved; put the model's folder back")
    for name, weight in _trained(network).items():
        weight.copy_(weights[name])


def _trained(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def merged_weights(network: nn.Module) -> dict[str, Tensor]:
    """Weights by the names of the plain model, adapters merged. The network itself does not change.

    Merged weights are in main memory, since a device may have no room for a second network. All others are the network's own,
    so that tied weights share their storage.
    """
    own = merged_layout(network)
    return {
        name: weight if weight.data_ptr() == own[name].data_ptr() else weight.cpu()
        for name, weight in iter_merged_weights(network)
    }


@torch.no_grad()
def iter_merged_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterates over the result of `merged_weights`; a merged weight is computed when it is yielded."""
    body = _saved_module(network)
    for name, weight in body.state_dict().items():
        if name.endswith(".base_layer.weight"):
            layer: Any = body.get_submodule(name.removesuffix(".base_layer.weight"))
            weight = weight + layer.get_delta_weight(ADAPTER)
        if ".lora_" not in name:
            yield _plain_name(name), weight


def merged_layout(network: nn.Module) -> dict[str, Tensor]:
    """Tensors with names, shapes and dtypes of `iter_merged_weights`, in its order, without the merged values."""
    return {_plain_name(name): weight for name, weight in _saved_module(network).state_dict().items() if ".lora_" not in name}


def _plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _saved_module(network: nn.Module) -> nn.Module:
    """The module whose weights a folder has: our own, or the transformers model in a `HuggingFaceNetwork`."""
    return network if isinstance(network, TinyTransformer) else network.get_submodule("model")


def _target_layers(layers: list[str], targets: Iterable[str] | None) -> list[str]:
    if targets is None:
        return layers
    chosen: list[str] = []
    for target in targets:
        matches = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not matches:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ModelFolderError(f"models.lora.targets names {target}, but the model's blocks have the linear layers {known}")
        chosen += [name for name in matches if name not in chosen]
    return chosen


@torch.no_grad()
def _init_adapters(network: nn.Module, seed: int) -> None:
    """Fresh adapters: A initialised like a linear layer, B zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in network.named_parameters():
        if ".lora_A." in name:
            drawn = torch.empty(weight.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            weight.copy_(drawn)
        elif ".lora_B." in name:
            weight.zero_()


@torch.no_grad()
def _frozen_digest(network: nn.Module) -> Tensor:
    """Digest [32] of the frozen weights, by their sums."""
    sums = hashlib.sha256()
    for name, weight in network.named_parameters():
        if not weight.requires_grad:
            total, size = (float(part) for part in (weight.sum(dtype=torch.float64), weight.abs().sum(dtype=torch.float64)))
            sums.update(f"{name} {total!r} {size!r}\n".encode())
    return torch.frombuffer(bytearray(sums.digest()), dtype=torch.uint8)
