"""The actor's trainer on virtual devices: it advances the clock and trains nothing."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_contract.spec import Ppo
from oppo_core.ppo.actor import EarlyPart
from oppo_core.ppo.experience import Experience
from oppo_core.rollout.sequence import Support
from oppo_core.simulation.machine import Machine


class SimulatedActor:
    """An `ActorProtocol` with the additional methods that update overlap uses."""

    saves_bytes = 0

    def __init__(self, machine: Machine, ppo: Ppo) -> None:
        self._machine = machine
        self._costs = machine.devices.costs.actor
        self._ppo = ppo
        self._retained: list[int] = []
        self.forget()

    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], supports: Rows[Support] = ()) -> list[Tensor]:
        """Zeros [T]. Graphs are retained for `update` as far as `Machine.retained` says."""
        lengths = [len(ids) for ids in tokens]
        loads = self._machine.loads(lengths, self._machine.batch_ranks)
        self._machine.work(self._machine.forward_us(self._costs, loads))
        self._retained = self._machine.retained(loads)
        return [torch.zeros(n - prompt) for n, prompt in zip(lengths, prompt_lengths, strict=True)]

    def update(
        self, experience: Experience, step: int, kl_coefficient: float, early: EarlyPart | None = None
    ) -> dict[str, float]:
        if self.is_critic_warmup(step):
            return self.warmup_metrics(step)
        done = frozenset[int]() if early is None else early.rows
        rows = [row for row in range(len(experience.tokens)) if row not in done]
        ranks = [experience.sequences[row].rank or 0 for row in rows]
        loads = self._machine.loads([len(experience.tokens[row]) for row in rows], ranks)
        for _ in range(self._ppo.epochs):
            self._machine.work(self._machine.update_us(self._costs, loads, self._retained))
            self.forget()
            self._machine.work(self._ppo.mini_batches * (self._costs.optimizer_us + self._machine.reduce_us(self._costs)))
        return {}

    def is_critic_warmup(self, step: int) -> bool:
        """Whether only the critic is trained in PPO step `step`."""
        return step < self._ppo.value_warmup_steps

    def warmup_metrics(self, step: int) -> dict[str, float]:
        """A step without training: the retained graph is dropped."""
        self.forget()
        return {}

    def hand_over(self) -> int:
        """Costs gathering the trained weights into the decoder's copy; the engine calls it where the weights are sharded."""
        self._machine.work(self._machine.hand_over_us())
        return int(self._costs.gathered_bytes)

    def forget(self) -> None:
        self._retained = [0] * self._machine.world

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        """Writes nothing; costs the time of a checkpoint."""
        self._machine.work(self._machine.devices.overheads.checkpoint_us)

    def load(self, folder: Path) -> None:
        pass
