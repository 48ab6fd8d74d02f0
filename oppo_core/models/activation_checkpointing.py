"""Activation checkpointing: values that a forward pass does not save are recomputed in the backward pass.

A pass saves per block some ten tensors of the residual stream's width, and of the head the logits over the whole vocabulary.
Passes without gradients (decoding, scoring) save nothing and are not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from oppo_contract.model_folder import ModelFolderError
from oppo_contract.sections.training import Training
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_estimate.memory import HEAD_SLICE

Recompute = Literal["off", "head", "selective", "full"]
# `selective` saves matrix products, which cost most, and attention, which costs most over long rows; but no batched products: if
# attention consists of these, they are quadratic in the row length.
KEPT = frozenset(
    {"aten::mm", "aten::addmm", "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
     "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention", "torch_attn::_varlen_attn"}
)  # fmt: skip


def prepare(network: Network, training: Training) -> None:
    """Configure a network for the passes of an update as `training` says.

    Raises:
        ModelFolderError: it cannot be packed, or its blocks cannot be recomputed.
    """
    if training.packs and network.refuses_packing:
        raise ModelFolderError(f"training.packing is on, but a model cannot be packed: {network.refuses_packing}; set it to off")
    recompute_blocks(network, training.recompute)


def recompute_blocks(network: Network, how: Recompute) -> None:
    """Recompute blocks in passes with gradients as `how` says; `off` and `head`: no block is recomputed.

    Raises:
        ModelFolderError: the network's blocks cannot be found.
    """
    _save_all(network)
    if how in ("off", "head"):
        return
    run = _selectively if how == "selective" else _recompute
    for block in transformer_blocks(network):
        # On the instance: the class and other networks of it do not change.
        block.__dict__["forward"] = partial(_passed, run, block.forward)


def _save_all(network: Network) -> None:
    assert isinstance(network, nn.Module)
    for module in network.modules():
        own = module.__dict__.get("forward")
        if isinstance(own, partial) and own.func is _passed:
            del module.__dict__["forward"]


def transformer_blocks(network: Network) -> list[nn.Module]:
    """The transformer's layers, in order.

    Raises:
        ModelFolderError: no list of modules has as many entries as there are layers.
    """
    if isinstance(network, TinyTransformer):
        return list(network.blocks)
    hugging: Any = network
    layers = len(network.cache_shape.layers)
    for module in hugging.backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return list(module)
    raise ModelFolderError(
        f"the blocks of {hugging.name} cannot be told apart, so they cannot be recomputed; set training.recompute to head or off"
    )


def in_slices(compute: Callable[..., tuple[Tensor, ...]], states_MH: Tensor, rows: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """`compute(states, *rows)`, which returns tensors [M], in slices of `HEAD_SLICE` states.

    `rows`: other inputs with an entry per state, sliced alike; empty ones are passed unchanged. With gradients only
    `states_MH` is
    saved, and a slice is recomputed when its gradient is needed.
    """
    parts, first = [], 0
    for states in torch.split(states_MH, HEAD_SLICE):
        cut = tuple(column[first : first + len(states)] for column in rows)
        parts.append(_recompute(compute, states, *cut) if torch.is_grad_enabled() else compute(states, *cut))
        first += len(states)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _passed(run: Callable[..., Any], forward: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return run(forward, *given, **named) if torch.is_grad_enabled() else forward(*given, **named)


def _recompute(compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Saves only its inputs. Nothing random: dropout is off."""
    return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False, **named)


def _selectively(compute: Callable[..., Any], *given: Any, **named: Any) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint(compute, *given, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named)


def _policy(context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name().split(".")[0] in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
