"""GELU (tanh form) in one kernel instead of eight.

GPT-2 and related models spell it out as a formula; torch has a fused forward and backward kernel. On a CPU the formula was 15 %
of a training pass (docs/performance.md).
"""

from __future__ import annotations

from torch import nn
from transformers.activations import GELUTanh, NewGELUActivation


def fuse_activations(model: nn.Module) -> None:
    """Replace each `NewGELUActivation` in `model` by the fused one; the configuration does not change."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, NewGELUActivation):
                setattr(parent, name, GELUTanh())
