"""Low-rank adapters (LoRA, arXiv 2106.09685) on any of our networks: W·x becomes W·x + (alpha ÷ rank)·B·A·x with a frozen W.

`peft` adds them beside the linear layers. B starts at zero, so an adapted network starts as the plain one. A checkpoint holds the
adapters and the scalar head; the frozen weights are loaded from their source, and a digest checks that they are the same. vLLM
and checkpoints get adapters in peft's format: in bfloat16, W + B·A loses all of B·A below half a unit in W's last place.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.sections.models import Lora
from oppo_core.models.protocol import Network
from oppo_core.models.sharded_weights import load_weights, shard_like
from oppo_core.models.tiny_transformer import TinyTransformer

HEADS = ("head.", "own_head.", "model.score.")  # ours, ours beside a Hugging Face backbone, a classifier's own
DIGEST = "frozen_bits"
OLD_DIGEST = "frozen_digest"  # of earlier versions: of float sums, which depend on the number of threads
ADAPTER = "default"  # peft's name for the first one
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # of a peft folder, beside adapter_config.json
PEFT_PREFIX = "base_model.model."
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per number
DIGEST_PART = 1 << 24  # numbers whose squares are in memory at one time


def inject_lora(network: nn.Module, lora: Lora, seed: int) -> None:
    """Add adapters to the layers that `lora` names, and freeze everything else but a scalar head.

    The first factor A is drawn from `seed` in the order of the layers; the second, B, is zero.

    Raises:
        ModelFolderError: a target is no linear layer of a block.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds to import, and few runs need it
    from transformers.pytorch_utils import Conv1D

    body = saved_module(network)
    chosen = _target_layers(linear_layers(body), lora.targets)
    config = LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=chosen, lora_dropout=0.0, bias="none",
        fan_in_fan_out=any(isinstance(body.get_submodule(name), Conv1D) for name in chosen),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, body)
    for layer in body.modules():
        if type(layer) is _fused().__base__:
            layer.__class__ = _fused()
    for name, weight in network.named_parameters():
        weight.requires_grad_("lora_" in name or name.startswith(HEADS))
    _init_adapters(network, seed)
    network.register_buffer(DIGEST, _frozen_digest(network), persistent=False)


@cache
def _fused() -> Any:
    """peft's adapted linear layer with one matrix product that adds B·A·x to W·x.

    peft's own makes three more results of W·x's size; on a CPU malloc keeps gaps where they were.
    """

    from peft.tuners.lora.layer import Linear

    class FusedLinear(Linear):  # type: ignore[misc]  # peft has no types
        def forward(self, x: Tensor) -> Tensor:
            low, whole = self.lora_A[ADAPTER](x), self.base_layer(x)
            up, scale = self.lora_B[ADAPTER].weight, self.scaling[ADAPTER]
            return torch.addmm(whole.flatten(0, -2), low.flatten(0, -2), up.t(), alpha=scale).view_as(whole)

    return FusedLinear


def has_lora(network: object) -> bool:
    """Whether `inject_lora` was called on it."""
    return hasattr(network, DIGEST)


def size_and_adapters(network: Network) -> tuple[int, bool]:
    """A network's number of weights, unsharded, and whether only adapters of it are trained."""
    return sum(weight.numel() for weight in network.parameters()), has_lora(network)


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
        load_weights(network, weights)
        return
    assert isinstance(network, nn.Module)
    _check_digest(network, weights.get(DIGEST), weights.get(OLD_DIGEST))
    for name, weight in _trained(network).items():
        weight.copy_(shard_like(weights[name], weight))


def _check_digest(network: nn.Module, saved: Tensor | None, old: Tensor | None) -> None:
    if saved is None:
        same = old is not None and any(torch.equal(old, digest) for digest in _old_digests(network))
    else:
        same = torch.equal(saved, network.get_buffer(DIGEST).cpu())
    if not same:
        raise ModelFolderError("the frozen weights have changed since the adapters were saved; put the model's folder back")


def _trained(network: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in network.named_parameters() if weight.requires_grad}


def save_adapter(network: nn.Module, folder: Path, base: Path | None = None) -> None:
    """Write the adapters, without a scalar head, as a folder that `peft` and vLLM read; `base`: folder of the frozen weights."""
    body: Any = saved_module(network)
    config = copy(body.peft_config[ADAPTER])
    config.base_model_name_or_path, config.task_type = None if base is None else str(base), "CAUSAL_LM"
    config.save_pretrained(folder)
    digest = bytes(network.get_buffer(DIGEST).tolist()).hex()
    tensors = {_peft_name(name): weight.detach().contiguous().cpu() for name, weight in _adapter(body).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt", DIGEST: digest})


@torch.no_grad()
def load_adapter(network: nn.Module, folder: Path) -> None:
    """Restore what `save_adapter` wrote.

    Raises:
        ModelFolderError: the frozen weights differ from those with which the adapters were trained.
    """
    with safe_open(folder / ADAPTER_WEIGHTS, "pt") as saved:
        digests = (saved.metadata().get(name) for name in (DIGEST, OLD_DIGEST))
        _check_digest(network, *(None if text is None else _as_tensor(bytes.fromhex(text)) for text in digests))
        for name, weight in _adapter(saved_module(network)).items():
            weight.copy_(saved.get_tensor(_peft_name(name)))


def _adapter(body: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in body.named_parameters() if ".lora_" in name}


def _peft_name(name: str) -> str:
    return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")


@torch.no_grad()
def merged_weights(network: nn.Module) -> dict[str, Tensor]:
    """Weights by the names of the plain model, adapters merged; all but merged ones share the network's memory.

    In the network's precision: convert it to float32 before.
    """
    body = saved_module(network)
    merged = {}
    for name, weight in body.state_dict().items():
        if name.endswith(".base_layer.weight"):
            layer: Any = body.get_submodule(name.removesuffix(".base_layer.weight"))
            weight = weight + layer.get_delta_weight(ADAPTER)
        if ".lora_" not in name:
            merged[name.replace(".base_layer.", ".")] = weight
    return merged


def saved_module(network: nn.Module) -> nn.Module:
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
    """Digest [32] of the frozen weights, by sums of their bit patterns and of the squares of these, modulo 2**64.

    Sums of integers do not depend on their order: the digest is the same on every device and with any number of threads.
    """
    digest = hashlib.sha256()
    for name, weight in network.named_parameters():
        if not weight.requires_grad:
            parts = torch.split(weight.detach().contiguous().view(BITS[weight.element_size()]).flatten(), DIGEST_PART)
            total = sum(int(part.sum(dtype=torch.int64)) for part in parts)
            squares = sum(int((part * part).sum(dtype=torch.int64)) for part in parts)
            digest.update(f"{name} {total % 2**64} {squares % 2**64}\n".encode())
    return _as_tensor(digest.digest())


def _old_digests(network: nn.Module) -> Iterator[Tensor]:
    """The digest of earlier versions, as any likely number of threads would give it."""
    before = torch.get_num_threads()
    try:
        for threads in dict.fromkeys((before, 1, *(2**power for power in range(1, 9)), *range(3, 65))):
            torch.set_num_threads(threads)
            yield _old_digest(network)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _old_digest(network: nn.Module) -> Tensor:
    digest = hashlib.sha256()
    for name, weight in network.named_parameters():
        if not weight.requires_grad:
            total, size = (float(part) for part in (weight.sum(dtype=torch.float64), weight.abs().sum(dtype=torch.float64)))
            digest.update(f"{name} {total!r} {size!r}\n".encode())
    return _as_tensor(digest.digest())


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
