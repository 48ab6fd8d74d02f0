"""What the actor's and the critic's trainers ask of whoever turns their losses into new weights.

Law for several ranks: each says by `begin` how many backward passes it will make, makes them, calls `even_out`, and then
`apply`. So a backend that meets the other ranks in every pass can make up what a rank has fewer than others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor
from torch.nn import Parameter

from oppo_contract.spec import Training
from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.ppo.lr_schedule import Rates
from oppo_core.ppo.optimizer import Optimizer

Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])


class Stepper(Protocol):
    """The optimizer of one role's network, and the way through the network that its gradients need."""

    rates: Rates
    parameters: list[Parameter]  # those of the network that are trained, in its order

    @property
    def holds_graphs(self) -> bool:
        """Whether a forward pass may keep its graph while others are made."""

    @property
    def saves_bytes(self) -> int:
        """About how much `state` holds."""

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """`compute` of the network that is trained. `network`: the one that all other roles see."""

    def begin(self, passes: int) -> None:
        """Forget gradients; so many backward passes come before the next `apply`."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the loss; what the ranks add up is the loss of the mini-batch."""

    def even_out(self) -> None:
        """This rank has made its passes. Others may need it for theirs still."""

    def fault(self, reason: str) -> None:
        """A loss is not finite. Raises NonFiniteError here, or on all ranks alike when the step would be taken."""

    def apply(self, step: int, role: str) -> float:
        """Clip, step, and return the gradient's norm before clipping. Raises NonFiniteError when that is not finite."""

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts by weight number, and weights that are kept more precisely than they are used.

        Every rank calls it; only what the first one gets is written.
        """

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave, of whichever backend and however many ranks. The network has its weights already."""


# Network, learning rates, weight decay, longest gradient, ranks.
StepperMaker = Callable[[Network, Rates, float, float, Ranks], Stepper]


def plain(network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks) -> Stepper:
    """AdamW in this process's memory, all of it on every rank."""
    return Optimizer(network.parameters(), rates, weight_decay, max_norm, ranks)


def stepper_of(training: Training) -> StepperMaker:
    """Who takes a role's steps, as the spec has it."""
    if training.backend == "plain":
        return plain
    if training.backend == "fsdp2":
        from oppo_core.training.fsdp import FsdpStepper  # torch's part for it is read only where it is wanted

        return FsdpStepper
    from oppo_core.training.zero import ZeroStepper  # DeepSpeed is there only where it is wanted

    return partial(ZeroStepper, training)
