"""Update overlap on virtual devices: simulated early gradients (`oppo_core/scoring/early.py`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from oppo_contract.events import Phase, Role
from oppo_contract.spec import Ppo
from oppo_core.ppo.critic import CriticUpdate
from oppo_core.ppo.early_gradients import EarlyGradients
from oppo_core.ppo.scored import Scored
from oppo_core.scoring.early import EarlyBatch
from oppo_core.simulation.machine import Machine, Times
from oppo_core.simulation.scorers import SimulatedScorers


class SimulatedEarlyScorers(SimulatedScorers):
    """Also an `EarlyTrainerProtocol`: the critic is read and trained in one pass over finished answers."""

    def __init__(self, machine: Machine, seed: int, has_reward_model: bool, ppo: Ppo) -> None:
        super().__init__(machine, seed, has_reward_model, ppo, reads_once=True)
        self._early: set[int] = set()

    def train_early(self, batch: EarlyBatch) -> None:
        """Costs one backward pass for the critic, two for the actor."""
        ids = [s.sequence_id for s in batch.sequences]
        loads, costs = self._whole(ids), self._machine.devices.costs
        self._order("actor", "actor-forward", self._machine.forward_us(costs.actor, loads, self._process), len(ids))
        forward = self._machine.forward_us(costs.critic, loads, self._process)
        backward = self._machine.backward_us(costs.critic, loads, self._process)
        self._order("critic", "update-critic", forward + backward, len(ids))
        backward = self._machine.backward_us(costs.actor, loads, self._process)
        self._order("actor", "update-actor", 2 * backward, len(ids))
        self._early |= set(ids)

    def _read_whole(self, sequence_ids: list[int]) -> None:
        super()._read_whole(self._late(sequence_ids))

    def wait_collect(self) -> dict[int, Scored]:
        return {i: self._with_proximal(scored) if i in self._early else scored for i, scored in super().wait_collect().items()}

    def start_critic_update(self, update: CriticUpdate) -> None:
        self._train_critic(self._late(update.sequence_ids))
        self._forget(update.sequence_ids)
        self._early = set()

    def _late(self, sequence_ids: list[int]) -> list[int]:
        """Those that were not trained early."""
        return [i for i in sequence_ids if i not in self._early]

    def _order(self, role: Role, phase: Phase, us: Times, rows: int) -> None:
        self._machine.submit(self._process, role, phase, us, rows=rows)

    def _with_proximal(self, scored: Scored) -> Scored:
        return replace(scored, proximal_logprobs=np.zeros(len(scored.values)))


def no_gradients() -> EarlyGradients:
    """Early gradients of a network without parameters."""
    return EarlyGradients([], [], [], torch.zeros(3))
