"""What sharding backends do alike with a network: all passes go through one module, whatever is computed of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Parameter

from oppo_core.models.protocol import Network
from oppo_core.training.stepper import Outputs


class Through(nn.Module):
    """A network whose passes a backend sees, whatever is computed of it."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = cast(nn.Module, network)

    def forward(self, compute: Callable[[Any], Outputs]) -> Outputs:
        """`compute` of the network."""
        return compute(self.network)


def trained_in(network: Network) -> list[Parameter]:
    """The parameters that are trained, in the network's order."""
    return [p for p in network.parameters() if p.requires_grad]


def is_short(parameter: Tensor) -> bool:
    """Whether steps would be lost on it, so that it is kept more precisely elsewhere."""
    return parameter.dtype.itemsize <= 2
