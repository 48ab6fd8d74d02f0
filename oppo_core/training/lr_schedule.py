"""Learning-rate schedules as pure functions of the PPO step, so that a resumed run needs only its step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oppo_contract.chosen_defaults import critic_learning_rate, learning_rate
from oppo_contract.sections.ppo import Schedule
from oppo_contract.spec import Ppo


@dataclass(frozen=True, slots=True)
class Rates:
    """One role's learning rate: 0 before step `start`, linear warm-up over `warmup` steps, then `schedule`.

    A decaying schedule starts from `peak` at the last warm-up step and reaches `final` · `peak` at the run's last step.
    """

    peak: float
    warmup: int = 0
    schedule: Schedule = "constant"
    final: float = 0.0
    start: int = 0
    steps: int = 1  # of the whole run

    def at(self, step: int) -> float:
        """Learning rate of PPO step `step`, counted from 0."""
        if step < self.start:
            return 0.0
        trained = step - self.start
        if trained < self.warmup or self.schedule == "constant":
            return self.peak * min(1.0, (trained + 1) / max(1, self.warmup))
        top, last = max(self.warmup - 1, 0), self.steps - 1 - self.start
        decayed = min(1.0, (trained - top) / max(1, last - top))
        share = 1 - decayed if self.schedule == "linear" else (1 + math.cos(math.pi * decayed)) / 2
        return self.peak * (self.final + (1 - self.final) * share)


def actor_rates(ppo: Ppo, steps: int, weights: int, adapters: bool) -> Rates:
    """The actor's rates, which start after critic warm-up (`value_warmup_steps`).

    `weights`: of the network; `adapters`: whether only adapters are trained. They decide where the spec leaves the rate empty.
    """
    peak = ppo.learning_rate or learning_rate(weights, adapters)
    return Rates(peak, ppo.warmup_steps, ppo.schedule, ppo.final_rate, ppo.value_warmup_steps, steps)


def critic_rates(ppo: Ppo, steps: int, weights: int, adapters: bool) -> Rates:
    """The critic's rates; arguments as of `actor_rates`."""
    peak = ppo.critic_learning_rate or critic_learning_rate(weights, adapters)
    warmup = ppo.warmup_steps if ppo.critic_warmup_steps is None else ppo.critic_warmup_steps
    return Rates(peak, warmup, ppo.critic_schedule, ppo.final_rate, 0, steps)
