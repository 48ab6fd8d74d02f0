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

    Without effect for a network that is on a GPU, not in float32, sharded, of our own architecture, or has less than
    `LEAST_DECODE_COPY` bytes of such weights.
    """

    def __init__(self, network: Network) -> None:
        self._layers = list(_linear_layers(network)) if isinstance(network, nn.Module) and _is_supported(network) else []
        if sum(_weight(layer).nbytes for layer in self._layers) < LEAST_DECODE_COPY:
            self._layers = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the present weights, and let the layers use the copies."""
        self.release()
        for layer in self._layers:
            own = layer.__dict__.get("forward")
            prepacked = torch.ops.mkldnn._reorder_linear_weight(_merged(layer), ROWS)
            layer.forward = _Product(layer, own, prepacked)

    def release(self) -> None:
        """Let the layers use their weights again, and free the copies."""
        for layer in self._layers:
            product = layer.__dict__.get("forward")
            if isinstance(product, _Product):
                del layer.forward
                if product.own is not None:
                    layer.forward = product.own


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """The `forward` of a layer that uses the copy. `own`: an instance's own `forward`, if it had one before."""

    layer: nn.Module
    own: Any
    prepacked: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # oneDNN's product has no derivative
            return cast(Tensor, self.own(x) if self.own is not None else type(self.layer).forward(self.layer, x))
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.prepacked, _bias(self.layer), "none", [], "")
        return out


def _is_supported(network: nn.Module) -> bool:
    if isinstance(network, TinyTransformer) or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weights = list(network.parameters())
    return all(w.device.type == "cpu" and w.dtype == torch.float32 and not isinstance(w, DTensor) for w in weights)


def _linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Linear layers, plain or with adapters; not of a subclass, which may compute something else."""
    for child in module.children():
        if type(getattr(child, "base_layer", child)) is nn.Linear:
            yield child
        elif not hasattr(child, "base_layer"):
            yield from _linear_layers(child)


def _weight(layer: Any) -> Tensor:
    return cast(Tensor, getattr(layer, "base_layer", layer).weight)


def _bias(layer: Any) -> Tensor | None:
    return cast("Tensor | None", getattr(layer, "base_layer", layer).bias)


def _merged(layer: Any) -> Tensor:
    """The layer's weight, with its adapter added."""
    weight = _weight(layer)
    return weight + layer.get_delta_weight(ADAPTER) if hasattr(layer, "base_layer") else weight.detach()
