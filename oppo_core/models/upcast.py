"""Outputs in float32 of networks whose weights are stored in fewer bits."""

from __future__ import annotations

from collections.abc import MutableMapping
from types import MethodType
from typing import Any

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
    if _on_gpu(hidden):
        product: Tensor = ProductInFloat32.apply(hidden.reshape(-1, hidden.shape[-1]), weight)  # type: ignore[no-untyped-call]
        out = product.view(*hidden.shape[:-1], len(weight))
    else:
        out = functional.linear(hidden.float(), _in_float32(weight))
    return out if bias is None else out + bias


class ProductInFloat32(torch.autograd.Function):
    """`hidden` [N, H] × `weight` [V, H] → [N, V] in float32, from 16-bit factors on a GPU; torch has no derivative of it.

    As in a 16-bit linear layer, the gradient is rounded to the factors' dtype before it is multiplied, and sums are in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_NH if weight_VH.requires_grad else None, weight_VH)
        return _product(hidden_NH, weight_VH.T)

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_NH, weight_VH = ctx.saved_tensors
        rounded = grad_NV.to(weight_VH.dtype)
        of_hidden, of_weight = ctx.needs_input_grad
        return rounded @ weight_VH if of_hidden else None, rounded.T @ hidden_NH if of_weight else None


def _on_gpu(hidden: Tensor) -> bool:
    return hidden.is_cuda


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right, out_dtype=torch.float32)


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
