"""The training backend that a spec asks for (`training.backend`): plain AdamW, FSDP2, or DeepSpeed's ZeRO."""

from __future__ import annotations

from functools import partial

from oppo_contract.spec import Training
from oppo_core.distributed.process_group import Ranks
from oppo_core.models.protocol import Network
from oppo_core.training.lr_schedule import Rates
from oppo_core.training.optimizer import Optimizer
from oppo_core.training.protocol import BackendFactory, TrainingBackend


def plain(network: Network, rates: Rates, weight_decay: float, max_norm: float, ranks: Ranks) -> TrainingBackend:
    """AdamW with the full state on every rank."""
    return Optimizer(network.parameters(), rates, weight_decay, max_norm, ranks)


def backend_factory(training: Training) -> BackendFactory:
    """The constructor of the backend that the spec asks for."""
    if training.backend == "plain":
        return plain
    if training.backend == "fsdp2":
        from oppo_core.training.fsdp import FsdpBackend  # imported only where it is used

        return FsdpBackend
    from oppo_core.training.zero import ZeroBackend  # DeepSpeed is optional

    return partial(ZeroBackend, training)
