"""Loads the networks of a run's roles from its spec."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from oppo_contract.machine import mib
from oppo_contract.model_folder import ModelFolderError, find
from oppo_contract.spec import ModelSpec, RunSpec
from oppo_core.models.model_io import load_model, load_with_base
from oppo_core.models.protocol import Network
from oppo_core.models.shared_weights import use_shared_weights

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# The actor's frozen weights, for the reference: a network over them, or the weights in shared memory.
FrozenBase = Network | dict[str, Tensor]


def load_actor(spec: RunSpec, roots: list[Path], device: torch.device) -> tuple[Network, Network | None]:
    """The actor, and its frozen base if that is the reference on the same device.

    Raises:
        ModelFolderError: see `load_model`; or its context is too short.
    """
    model, lora, dtype = spec.models.actor, spec.models.lora, DTYPES[spec.resources.dtype]
    base = None
    if lora is not None and spec.models.reference_is_base and not spec.resources.scoring_devices:
        network, base = load_with_base(model, roots, dtype, spec.seed, lora, device)
    else:
        network = load_model(model, "lm", roots, dtype, spec.seed, lora, device)
    check_contexts(spec, network)
    return network, base


def load_reference(spec: RunSpec, roots: list[Path], device: torch.device, base: FrozenBase | None) -> Network:
    """The reference: `base`, or a network over its weights, if given; otherwise a model of its own.

    Raises ModelFolderError as `load_actor` does.
    """
    if base is not None and not isinstance(base, dict):
        return base
    models, dtype = spec.models, DTYPES[spec.resources.dtype]
    sharded = spec.training.shards_weights
    network = load_model(models.reference or models.actor, "lm", roots, dtype, spec.seed, device=device, sharded=sharded)
    if base is not None:
        use_shared_weights(network, base)
    check_contexts(spec, network)
    for weight in network.parameters():
        weight.requires_grad_(False)
    return network


def load_critic(spec: RunSpec, roots: list[Path], device: torch.device) -> Network | None:
    """The critic, if the run's algorithm has one. Raises ModelFolderError as `load_actor` does."""
    if not spec.ppo.has_critic:
        return None
    lora = spec.models.lora if spec.models.lora is not None and spec.models.lora.critic else None
    model, dtype, sharded = spec.role_models()["critic"], DTYPES[spec.resources.dtype], spec.training.shards_weights
    network = load_model(model, "scalar", roots, dtype, spec.seed + 2, lora, device, sharded)
    check_contexts(spec, network)
    return network


def describe_models(spec: RunSpec, roots: list[Path]) -> list[str]:
    """A line for each role's model: where its weights come from, and their size on disk."""
    return [f"Loading {role}: {_describe(model, roots)}" for role, model in spec.role_models().items()]


def _describe(model: ModelSpec, roots: list[Path]) -> str:
    if model.tiny is not None:
        return "built-in, random weights"
    assert model.path is not None
    try:
        folder = find(model.path, roots)
    except ModelFolderError:  # a hub id, which transformers resolves
        return model.path
    return f"{folder} ({mib(sum(file.stat().st_size for file in folder.glob('*.safetensors')))})"


def check_contexts(spec: RunSpec, network: Network) -> None:
    """Raises ModelFolderError when the longest prompt and answer do not fit the network."""
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    if network.context < longest:
        raise ModelFolderError(
            f"a model's context is {network.context} tokens, but rollout.max_prompt_tokens + rollout.max_new_tokens"
            f" is {longest}; lower one of them"
        )
