"""What sharding backends do alike with a network: all passes go through one module, whatever is computed of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import Parameter

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.training.backends import Outputs


class Through(nn.Module):
    """A network whose passes a backend sees, whatever is computed of it."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = cast(nn.Module, network)

    def forward(self, compute: Callable[[Any], Outputs]) -> Outputs:
        """`compute` of the network."""
        return compute(self.network)


class EvenPasses(ABC):
    """How a stepper whose passes meet the other ranks keeps the law of `Stepper`.

    All ranks make as many backward passes as the one that has most: one that has fewer repeats its latest with a loss of zero.
    And none stops on its own account: a loss that is not finite is remembered, and all end before the step.
    """

    def __init__(self, network: Network, ranks: Ranks) -> None:
        """`network`: the one that the other roles see."""
        self.ranks = ranks
        self._whole = network
        self._due = 0  # backward passes before the next step
        self._fault = ""
        self._latest: Callable[[Network], tuple[Tensor, ...]] | None = None

    @abstractmethod
    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """See `Stepper.forward`. With gradients it notes `compute` as the latest."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """See `Stepper.backward`. One pass less is due."""

    def count(self, passes: int) -> None:
        """The most passes that a rank has are due."""
        self._due = max(int(told) for told in self.ranks.gather(str(passes).encode()))

    def even_out(self) -> None:
        """See `Stepper.even_out`."""
        while self._due:
            assert self._latest is not None, "a rank has no rows of its own"
            self.backward(self.forward(self._latest, self._whole)[0].sum() * 0.0)

    def fault(self, reason: str) -> None:
        """See `Stepper.fault`: `refuse_faults` raises it."""
        self._fault = self._fault or reason

    def refuse_faults(self) -> None:
        """Raises NonFiniteError on all ranks where one has had a fault."""
        with self.ranks.agreed(NonFiniteError):
            if self._fault:
                raise NonFiniteError(self._fault)


def trained_in(network: Network) -> list[Parameter]:
    """The parameters that are trained, in the network's order."""
    return [p for p in network.parameters() if p.requires_grad]


def is_short(parameter: Tensor) -> bool:
    """Whether steps would be lost on it, so that it is kept more precisely elsewhere."""
    return parameter.dtype.itemsize <= 2
