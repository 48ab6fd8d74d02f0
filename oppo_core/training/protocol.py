"""The protocol between a role's trainer and the training backend that turns its losses into new weights.

With several ranks: each rank announces in `begin` how many backward passes it will make, makes them, calls `pad_passes`, then
`apply`. A backend that communicates in every pass can so add passes on a rank that has fewer than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import Tensor
from torch.nn import Parameter

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.training.lr_schedule import Rates

Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])


class TrainingBackend(Protocol):
    """Forward, backward and optimizer step of one role's network, on one process or sharded over the ranks."""

    rates: Rates
    parameters: list[Parameter]  # the trainable ones, in the order of the network

    @property
    def holds_graphs(self) -> bool:
        """Whether a forward pass may keep its autograd graph while other passes run."""

    @property
    def saves_bytes(self) -> int:
        """Approximate size of `state` in bytes."""

    def forward(self, compute: Callable[[Network], Outputs], network: Network) -> Outputs:
        """One pass: apply `compute` to `network`, which is the one that is trained."""

    def reads(self, passes: int, shortest: Callable[[Network], Any]) -> AbstractContextManager[None]:
        """Context manager around `passes` calls of `forward` without gradients.

        Where passes are collective, it adds those, of `shortest`, that other ranks have more. Every rank must enter it.
        """

    def begin(self, passes: int) -> None:
        """Zero the gradients and announce `passes` backward passes before the next `apply`."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this rank's part of the loss; the sum over the ranks is the mini-batch's loss."""

    def pad_passes(self, compute: Callable[[Network], Outputs]) -> None:
        """Add the passes that other ranks still have to make: `compute`, with a loss of zero."""

    def fault(self, reason: str) -> None:
        """Report a loss that is not finite. Raises NonFiniteError here, or in `apply` on every rank."""

    def apply(self, step: int, role: str) -> float:
        """Clip, step, and return the gradient norm before clipping. Raises NonFiniteError if the norm is not finite."""

    def state(self) -> dict[str, Tensor]:
        """Adam moments and step counts by parameter number, and float32 master weights where the network is in bfloat16.

        Collective: every rank calls it. Rank 0 writes whole tensors, and every rank its shards.
        """

    @property
    def shards(self) -> Mapping[str, Tensor]:
        """By the names of `state`: for each tensor that is sharded, one with the same shards."""

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Load the result of `state` of any backend and any number of ranks. The network's weights are loaded already.

        What is named in `shards` may be this rank's shards.
        """


# Arguments: network, learning rates, weight decay, max gradient norm, ranks.
BackendFactory = Callable[[Network, Rates, float, float, Ranks], TrainingBackend]
