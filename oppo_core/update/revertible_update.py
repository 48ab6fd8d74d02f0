"""Updates for `ppo.on_nonfinite` other than raise: both roles train on trial, and a step counts when both trials are sound.

Otherwise neither role moves, to the bit, whichever of them met the fault; `oppo_core/update/nonfinite.py` decides what follows.
Copies of weights and moments are held for as long as the trial lasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oppo_core.ppo.experience import Experience
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.ppo.trial import Trial
from oppo_core.rollout.sequence import Sequence
from oppo_core.update.strategies import PlainUpdate, critic_order, experience_of

if TYPE_CHECKING:
    from oppo_core.engine.build import Engine


class CarefulUpdate(PlainUpdate):
    """`PlainUpdate` that can be taken back."""

    def learn(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """See `Updating.learn`. Sound or not, the batch is let go of.

        Raises:
            NonFiniteError: a score, loss or gradient was not finite; no weight and no moment has changed.
        """
        try:
            return self._try(engine, trained, version)
        finally:
            engine.actor.forget()
            engine.let_go(trained)

    def _try(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        experience, parts = experience_of(engine, trained, version)
        self.start_critic(engine, experience, version)
        early = self.wait_critic(engine) if engine.updates_in_turn else None
        with engine.trace.span("actor", "update-actor", rows=len(trained)):
            actor = engine.actor.attempt(experience, version, engine.progress.kl_coefficient)
        critic = early if early is not None else self.wait_critic(engine)
        fault = actor.fault or critic.fault
        engine.actor.settle(fault is None, version)
        self.settle_critic(engine, fault is None)
        if fault is not None:
            raise NonFiniteError(fault)
        return experience, actor.metrics | critic.metrics | parts

    def start_critic(self, engine: Engine, experience: Experience, version: int) -> None:
        """Train the critic on trial, beside the actor."""
        with engine.trace.span("actor", "advantages", rows=len(experience.sequences)):
            order = critic_order(experience, version)
        engine.scorers.start_trial(order)

    def wait_critic(self, engine: Engine) -> Trial:
        """How it went."""
        with engine.trace.wait("update"):
            return engine.scorers.wait_trial()

    def settle_critic(self, engine: Engine, keep: bool) -> None:
        """Keep what the critic has learned, or take it back."""
        engine.scorers.settle(keep)


class CarefulCriticFreeUpdate(CarefulUpdate):
    """The same for GRPO and RLOO: there is only the actor to train."""

    def start_critic(self, engine: Engine, experience: Experience, version: int) -> None:
        """There is no critic."""

    def wait_critic(self, engine: Engine) -> Trial:
        """There is no critic: nothing went wrong."""
        return Trial()

    def settle_critic(self, engine: Engine, keep: bool) -> None:
        """There is no critic."""
