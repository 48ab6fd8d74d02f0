"""What FSDP2 and ZeRO have in common: passes go through one module, and every rank makes the same number of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Parameter

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.training.optimizer import NonFiniteError
from oppo_core.training.protocol import Outputs


class PassThroughModule(nn.Module):
    """Wraps a network so that a sharding backend sees every forward pass through `forward`."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = cast(nn.Module, network)

    def forward(self, compute: Callable[[Any], Outputs]) -> Outputs:
        """Apply `compute` to the network."""
        return compute(self.network)


class EqualizedPasses(ABC):
    """A backend whose passes contain collectives, so every rank must make the same number of them.

    A rank with fewer backward passes than the others adds short ones with a loss of zero. A loss that is not finite is recorded,
    and every rank raises before the optimizer step.
    """

    def __init__(self, network: Network, ranks: Ranks) -> None:
        self.ranks, self.network = ranks, network
        self._due = 0  # backward passes left before the next step
        self._fault = ""

    @abstractmethod
    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """As in `TrainingBackend`."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """As in `TrainingBackend`; counts one pass."""

    def count(self, passes: int) -> None:
        """Set the number of passes to the maximum over the ranks."""
        self._due = max(int(count) for count in self.ranks.all_gather(str(passes).encode()))

    def pad_passes(self, compute: Callable[[Network], Outputs]) -> None:
        """Run `compute` with a loss of zero until this rank has made as many passes as the others."""
        while self._due:
            self.backward(self.forward(compute, self.network)[0].sum() * 0.0)

    def fault(self, reason: str) -> None:
        """Record the first fault; `raise_faults` raises it on every rank."""
        self._fault = self._fault or reason

    def raise_faults(self) -> None:
        """Raise NonFiniteError on every rank if any rank recorded a fault."""
        with self.ranks.raise_on_all(NonFiniteError):
            if self._fault:
                raise NonFiniteError(self._fault)


def trainable_parameters(network: Network) -> list[Parameter]:
    """Parameters with `requires_grad`, in the network's order."""
    return [p for p in network.parameters() if p.requires_grad]


def is_low_precision(parameter: Tensor) -> bool:
    """Whether a tensor has 16 bits or fewer, so that it needs a float32 master copy."""
    return parameter.dtype.itemsize <= 2
