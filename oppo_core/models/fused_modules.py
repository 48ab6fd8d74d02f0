"""Modules of transformers models that spell out a formula, replaced by torch's fused ones.

The tanh form of GELU (GPT-2) is eight kernels without this, and 15 % of a training pass on a CPU. RMSNorm (Llama, Qwen, Mistral
and most others) is eight as well, twice per layer: on a GPU a third of a decode step's kernels (docs/measurements/2026-11-27.md).
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def fuse_modules(model: nn.Module) -> None:
    """Replace such modules in `model`; names of weights and the configuration do not change.

    In float64, which only comparisons with transformers use, its RMSNorm stays: it rounds to float32, and torch's does not.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, GELUTanh())
            elif _is_rms_norm(type(child)):  # type: ignore[arg-type]
                setattr(parent, name, _fused_rms_norm(child))


@cache
def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Whether `kind` computes what Llama's RMSNorm does; Gemma's, for example, multiplies by 1 + weight.

    transformers copies the class to each model's file under another name, with the same source.
    """
    if not kind.__name__.endswith("RMSNorm"):
        return False
    try:
        return inspect.getsource(kind.forward) == inspect.getsource(LlamaRMSNorm.forward)
    except OSError:  # installed without sources
        return False


def _fused_rms_norm(norm: Any) -> nn.Module:
    """torch's RMSNorm with the same weight. In bfloat16 it rounds once, after the product with the weight, not before it too."""
    if norm.weight.ndim != 1 or norm.weight.dtype == torch.float64:
        return cast(nn.Module, norm)
    fused = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, device="meta")
    fused.weight = norm.weight
    return fused.train(norm.training)
