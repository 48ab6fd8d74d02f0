"""Update overlap on virtual devices: the scorers' process trains along (`oppo_core/scoring/overlapped_trainer.py`)."""

from __future__ import annotations

import numpy as np

from oppo_contract.spec import Ppo
from oppo_core.scoring.overlapped_trainer import EarlyOrder, LateUpdate, ShareOrder
from oppo_core.scoring.results import Scored
from oppo_core.simulation.devices import Devices
from oppo_core.simulation.machine import Machine
from oppo_core.simulation.scorers import SimulatedScorers
from oppo_core.update.work_split import Costs


class SimulatedPartner(SimulatedScorers):
    """A `Partnership` too: the critic is read and trained in one pass over whole answers, the actor's update is shared."""

    streamed = ("reward", "reference")

    def __init__(self, machine: Machine, seed: int, has_reward_model: bool, ppo: Ppo) -> None:
        super().__init__(machine, seed, has_reward_model, ppo)
        self._process = machine.beside("critic")
        self._early: set[int] = set()
        self._early_actor: set[int] = set()
        self._theirs: list[int] = []

    def train_early(self, order: EarlyOrder) -> None:
        """See `Partnership.train_early`: one backward pass for the critic, two for the actor."""
        ids = [s.sequence_id for s in order.sequences]
        lengths, costs = self._lengths(ids), self._machine.devices.costs
        forward = self._machine.forward_us(costs.critic, lengths, self._process)
        backward = self._machine.backward_us(costs.critic, lengths, self._process)
        self._order("critic", "update-critic", forward + backward, len(ids))
        self._early |= set(ids)
        if order.actor:
            forward = self._machine.forward_us(costs.actor, lengths, self._process)
            backward = self._machine.backward_us(costs.actor, lengths, self._process)
            self._order("actor", "update-actor", forward + 2 * backward, len(ids))
            self._early_actor |= set(ids)

    def start_share(self, order: ShareOrder) -> None:
        """See `Partnership.start_share`."""
        costs, late = self._machine.devices.costs, [i for i in order.sequence_ids if i not in self._early]
        self._asked, self._theirs = order.sequence_ids, order.theirs
        read = self._machine.forward_us(costs.critic, self._lengths(late), self._process)
        self._order("critic", "critic-prefill", read, len(late))
        read = self._machine.forward_us(costs.actor, self._lengths(order.theirs), self._process)
        self._order("actor", "actor-forward", read, len(order.theirs))
        score_us = len(order.sequence_ids) * self._machine.devices.overheads.score_us
        self._machine.order(self._machine.beside("reward"), "reward", "score", score_us, rows=len(order.sequence_ids))

    def wait_share(self) -> dict[int, Scored]:
        """See `Partnership.wait_share`."""
        rated = self._early_actor | set(self._theirs)
        return {i: self._with_proximal(i) if i in rated else scored for i, scored in self.wait_collect().items()}

    def start_late_update(self, update: LateUpdate) -> None:
        """See `Partnership.start_late_update`."""
        costs = self._machine.devices.costs
        late = [i for i in self._asked if i not in self._early]
        us = self._machine.backward_us(costs.critic, self._lengths(late), self._process) + costs.critic.optimizer_us
        self._order("critic", "update-critic", us, len(late))
        us = self._machine.backward_us(costs.actor, self._lengths(self._theirs), self._process)
        self._order("actor", "update-actor", us, len(self._theirs))
        self._forget(self._asked)
        self._early, self._early_actor, self._theirs = set(), set(), []

    def wait_late_update(self) -> dict[str, float]:
        """See `Partnership.wait_late_update`."""
        return self.wait_critic_update() | {"entropy": 0.0}

    def _order(self, role: str, phase: str, us: float, rows: int) -> None:
        self._machine.order(self._process, role, phase, us, rows=rows)  # type: ignore[arg-type]

    def _lengths(self, sequence_ids: list[int]) -> list[int]:
        return [self.tracks[i].total for i in sequence_ids]

    def _with_proximal(self, sequence_id: int) -> Scored:
        scored = self._scored(sequence_id)
        return Scored(scored.score, scored.reference_logprobs, scored.values, np.zeros(len(scored.values)))


def ledger_costs(devices: Devices, whitens: bool) -> Costs:
    """What the ledger of update overlap believes, in units of one token's forward pass without a head: the critic's."""
    actor, unit = devices.costs.actor.token_us, devices.costs.critic.token_us or devices.costs.actor.token_us
    if not unit:
        return Costs(0.0, 0.0, whitens)
    return Costs(devices.costs.decode.round_us / unit, max(0.0, actor / unit - 1), whitens)
