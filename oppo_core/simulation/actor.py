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
        self._retained_tokens = 0

    def logprobs(self, tokens: list[NDArray[np.int64]], prompt_lengths: list[int], supports: Rows[Support] = ()) -> list[Tensor]:
        """Zeros [T]. With one optimizer step per batch the graph of one pass is retained for `update`."""
        lengths = [len(ids) for ids in tokens]
        self._machine.work(self._machine.forward_us(self._costs, lengths))
        one_step = self._ppo.epochs * self._ppo.mini_batches == 1
        self._retained_tokens = min(self._machine.tokens(lengths), self._machine.pass_tokens) if one_step else 0
        return [torch.zeros(n - prompt) for n, prompt in zip(lengths, prompt_lengths, strict=True)]

    def update(
        self, experience: Experience, step: int, kl_coefficient: float, early: EarlyPart | None = None
    ) -> dict[str, float]:
        if self.is_critic_warmup(step):
            return self.warmup_metrics(step)
        done = frozenset[int]() if early is None else early.rows
        lengths = [len(tokens) for row, tokens in enumerate(experience.tokens) if row not in done]
        for _ in range(self._ppo.epochs):
            self._train(lengths)
            self._machine.work(self._ppo.mini_batches * self._costs.optimizer_us)
        return {}

    def _train(self, lengths: list[int]) -> None:
        """Forward passes where no graph was retained, and backward passes."""
        forward = max(0, self._machine.tokens(lengths) - self._retained_tokens)
        self._retained_tokens = 0
        self._machine.work(self._machine.forward_us(self._costs, [forward]) + self._machine.backward_us(self._costs, lengths))

    def is_critic_warmup(self, step: int) -> bool:
        """Whether only the critic is trained in PPO step `step`."""
        return step < self._ppo.value_warmup_steps

    def warmup_metrics(self, step: int) -> dict[str, float]:
        """A step without training: the retained graph is dropped."""
        self._retained_tokens = 0
        return {}

    def hand_over(self) -> int:
        """No-op: not modelled."""
        return 0

    def forget(self) -> None:
        self._retained_tokens = 0

    def save(self, folder: Path, source: Path | None, eos: int, pad: int) -> None:
        """Writes nothing; costs the time of a checkpoint."""
        self._machine.work(self._machine.devices.overheads.checkpoint_us)

    def load(self, folder: Path) -> None:
        pass
