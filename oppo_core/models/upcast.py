"""Outputs in float32 of networks whose weights are stored in fewer bits."""

from __future__ import annotations

from collections.abc import MutableMapping
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

LOW_PRECISION = (torch.bfloat16, torch.float16)
# Frozen weight → (its version and address, its float32 copy). A weight that is changed in place through `.data` goes unnoticed.
_float32_copies: MutableMapping[Tensor, tuple[tuple[int, int], Tensor]] = WeakTensorKeyDictionary()


def precise(values: Tensor) -> Tensor:
    """The same values in float32 at least: log-probs of a whole vocabulary need more than bfloat16's eight bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def linear_in_float32(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer [..., H] → [..., V] whose output has float32 at least.

    A bfloat16 output would be rounded to steps of 0.125 at logits near 20. Products are summed in float32 in either case; a GPU
    keeps the sum (`out_dtype`), and a CPU, which has no such product, multiplies by a float32 copy of the weight.
    """
    if hidden.dtype not in LOW_PRECISION:
        return functional.linear(hidden, weight, bias)
    if hidden.is_cuda:
        out = torch.mm(hidden.flatten(0, -2), weight.T, out_dtype=torch.float32).view(*hidden.shape[:-1], len(weight))
    else:
        out = functional.linear(hidden.float(), _in_float32(weight))
    return out if bias is None else out + bias


def _in_float32(weight: Tensor) -> Tensor:
    """A float32 copy. That of a frozen weight is retained: to convert a vocabulary takes as long as to multiply by it."""
    if weight.requires_grad:
        return weight.float()
    known, state = _float32_copies.get(weight), (weight._version, weight.data_ptr())
    if known is None or known[0] != state:
        known = _float32_copies[weight] = state, weight.float()
    return known[1]


def output_in_float32(head: nn.Module) -> None:
    """Let a linear head return float32, in place; its hooks still run."""
    if isinstance(head, nn.Linear):
        head.forward = MethodType(_forward, head)  # type: ignore[method-assign]


def _forward(head: nn.Linear, hidden: Tensor) -> Tensor:
    return linear_in_float32(hidden, head.weight, head.bias)
