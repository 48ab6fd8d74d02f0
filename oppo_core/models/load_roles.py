"""Loads the networks of a run's roles from its spec."""

from __future__ import annotations

from pathlib import Path

import torch

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.spec import ModelSpec, RunSpec
from oppo_core.models.model_io import Base, load_model, load_reference, load_with_base
from oppo_core.models.protocol import Network

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


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


def load_role_reference(spec: RunSpec, roots: list[Path], device: torch.device, base: Base | None) -> Network:
    """The reference; `base`: see `load_reference`. Raises ModelFolderError as `load_actor` does."""
    network = load_reference(spec.models, roots, DTYPES[spec.resources.dtype], spec.seed, device, base)
    check_contexts(spec, network)
    return network


def load_critic(spec: RunSpec, roots: list[Path], device: torch.device) -> Network | None:
    """The critic, if the run's algorithm has one. Raises ModelFolderError as `load_actor` does."""
    if not spec.ppo.has_critic:
        return None
    lora = spec.models.lora if spec.models.lora is not None and spec.models.lora.critic else None
    network = load_model(_critic_source(spec), "scalar", roots, DTYPES[spec.resources.dtype], spec.seed + 2, lora, device)
    check_contexts(spec, network)
    return network


def _critic_source(spec: RunSpec) -> ModelSpec:
    if spec.models.critic == "actor":
        return spec.models.actor
    if spec.models.critic == "reward":
        assert spec.models.reward.model is not None  # the spec's validator guarantees it
        return spec.models.reward.model
    return spec.models.critic


def check_contexts(spec: RunSpec, network: Network) -> None:
    """Raises ModelFolderError when the longest prompt and answer do not fit the network."""
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_new_tokens
    if network.context < longest:
        raise ModelFolderError(
            f"a model's context is {network.context} tokens, but rollout.max_prompt_tokens + rollout.max_new_tokens"
            f" is {longest}; lower one of them"
        )
