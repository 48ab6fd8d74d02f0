"""Activation checkpointing: values that a forward pass does not save are recomputed in the backward pass.

A pass saves per block some ten tensors of the residual stream's width, and of the head the logits over the whole vocabulary.
Passes without gradients (decoding, scoring) save nothing and are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.sections.training import Training
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_estimate.memory import HEAD_SLICE

# `selective` saves matrix products, which cost most, and attention, which costs most over long rows; but no batched products: if
# attention consists of these, they are quadratic in the row length.
SAVED_OPERATIONS = frozenset(
    {"aten::mm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
     "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention", "torch_attn::_varlen_attn"}
)  # fmt: skip


def prepare_for_training(network: Network, training: Training) -> None:
    """Configure a network for the passes of an update as `training` says.

    Raises:
        ModelFolderError: it cannot be packed, or its blocks cannot be recomputed.
    """
    if training.packs and network.refuses_packing:
        raise ModelFolderError(f"training.packing is on, but a model cannot be packed: {network.refuses_packing}; set it to off")
    _remove_wrappers(network)
    if training.recompute in ("off", "head"):
        return
    run = _checkpoint_selectively if training.recompute == "selective" else _checkpoint
    for block in transformer_blocks(network):
        # On the instance: the class and other networks of it do not change.
        block.__dict__["forward"] = partial(_wrapped_forward, run, block.forward)


def _remove_wrappers(network: Network) -> None:
    assert isinstance(network, nn.Module)
    for module in network.modules():
        own = module.__dict__.get("forward")
        if isinstance(own, partial) and own.func is _wrapped_forward:
            del module.__dict__["forward"]


def transformer_blocks(network: Network) -> list[nn.Module]:
    """The transformer's layers, in order.

    Raises:
        ModelFolderError: no list of modules has as many entries as there are layers.
    """
    if isinstance(network, TinyTransformer):
        return list(network.blocks)
    model: Any = network
    layers = len(network.cache_shape.layers)
    for module in model.backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return list(module)
    raise ModelFolderError(
        f"the blocks of {model.name} cannot be told apart, so they cannot be recomputed; set training.recompute to head or off"
    )


def checkpoint_slices(compute: Callable[..., tuple[Tensor, ...]], states_MH: Tensor, rows: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """`compute(states, *rows)`, which returns tensors [M], in slices of `HEAD_SLICE` states.

    `rows`: other inputs with an entry per state, sliced alike; empty ones are passed unchanged. With gradients only `states_MH`
    is saved, and a slice is recomputed when its gradient is needed.
    """
    parts, first = [], 0
    for states in torch.split(states_MH, HEAD_SLICE):
        cut = tuple(column[first : first + len(states)] for column in rows)
        parts.append(_checkpoint(compute, states, *cut) if torch.is_grad_enabled() else compute(states, *cut))
        first += len(states)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _wrapped_forward(run: Callable[..., Any], forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return run(forward, *given, **named) if torch.is_grad_enabled() else forward(*given, **named)


def _checkpoint(compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Saves only its inputs. Nothing random: dropout is off."""
    return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False, **named)


def _checkpoint_selectively(compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named)


def _policy(context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name().split(".")[0] in SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
