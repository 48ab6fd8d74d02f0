"""Linear weights for decoding on a CPU: adapters merged, and in the blocked layout of oneDNN ("prepacked").

A decode step multiplies a few rows by every weight. torch's product of so few rows reads weights at a fraction of the memory's
bandwidth and gains little from a second core; oneDNN's, on prepacked weights, is up to three times as fast, and merged adapters
cost nothing per token (docs/measurements/2026-11-29.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oppo_core.models.adapters import ADAPTER
from oppo_core.models.protocol import Network
from oppo_core.models.tiny_transformer import TinyTransformer
from oppo_estimate.memory import LEAST_DECODE_COPY

ROWS = 16  # of a product, for which oneDNN chooses the layout


class DecodeWeights:
    """Copies of a network's linear weights, which its layers use between `refresh` and `release` in passes without gradients.

    Without effect for a network that is on a GPU, not in float32, sharded, or has less than `LEAST_DECODE_COPY` bytes of such
    weights.
    """

    def __init__(self, network: Network) -> None:
        self._products = list(_products(network)) if isinstance(network, nn.Module) and _is_supported(network) else []
        if sum(product.base.weight.nbytes for product in self._products) < LEAST_DECODE_COPY:
            self._products = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the present weights, and let the layers use the copies."""
        self.release()
        for product in self._products:
            product.use_copy()

    def release(self) -> None:
        """Let the layers use their weights again, and free the copies."""
        for product in self._products:
            product.use_weight()


@dataclass(slots=True, eq=False)
class _Product:
    """The method `name` of `module`, which multiplies by a weight: a linear layer's `forward`, or a tied head's `logits`.

    `base` has the weight, and perhaps a bias. `own`: an instance's own method of this name, if it had one before.
    """

    module: Any
    name: str
    base: Any
    own: Any = None
    prepacked: Tensor | None = None

    def use_copy(self) -> None:
        current = self.module.__dict__.get(self.name)
        if isinstance(current, _Product):  # another decoder's, or the same layer's under another name
            current.use_weight()
        weight = self.base.weight.detach()
        if hasattr(self.module, "base_layer"):
            weight = weight + self.module.get_delta_weight(ADAPTER)
        self.prepacked = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.own = self.module.__dict__.get(self.name)
        setattr(self.module, self.name, self)

    def use_weight(self) -> None:
        if self.module.__dict__.get(self.name) is not self:
            return
        delattr(self.module, self.name)
        if self.own is not None:
            setattr(self.module, self.name, self.own)
        self.prepacked = self.own = None

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # oneDNN's product has no derivative
            return cast(Tensor, self.own(x) if self.own is not None else getattr(type(self.module), self.name)(self.module, x))
        bias = getattr(self.base, "bias", None)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.prepacked, bias, "none", [], "")
        return out


def _is_supported(network: nn.Module) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weights = list(network.parameters())
    return all(w.device.type == "cpu" and w.dtype == torch.float32 and not isinstance(w, DTensor) for w in weights)


def _products(network: nn.Module) -> Iterator[_Product]:
    """One for every linear layer, plain or with adapters; not of a subclass, which may compute something else."""
    for child in network.children():
        base = getattr(child, "base_layer", child)
        if type(base) is nn.Linear:
            yield _Product(child, "forward", base)
        elif base is child:
            yield from _products(child)
    if isinstance(network, TinyTransformer) and network.head is None:
        yield _Product(network, "logits", network.embedding)
