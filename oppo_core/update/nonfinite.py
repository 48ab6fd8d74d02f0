"""What follows a loss, gradient or score that is not finite (`ppo.on_nonfinite`; docs/algorithm.md, "Not finite").

`raise` ends the run. `skip` leaves out the step: before each optimizer step both roles compute their gradients, and neither steps
unless both gradients are finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from oppo_core.ppo.critic import critic_order
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.optimizer import NonFiniteError
from oppo_core.ppo.stepwise import Pause, Stepwise
from oppo_core.rollout.sequence import Sequence
from oppo_core.update.strategies import PlainUpdate, actor_of, experience_of

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine


@contextmanager
def tolerated(engine: Engine) -> Iterator[None]:
    """Around a PPO step: with `skip`, a step that is not finite is counted and left out.

    Raises:
        NonFiniteError: `ppo.on_nonfinite` is raise, or there were `nonfinite_limit` such steps in a row.
    """
    try:
        yield
    except NonFiniteError as error:
        ppo, progress = engine.spec.ppo, engine.progress
        if ppo.on_nonfinite == "raise":
            raise
        row = progress.nonfinite_row + 1
        if row >= ppo.nonfinite_limit:
            raise NonFiniteError(f"{error} ({row} such steps in a row, ppo.nonfinite_limit)") from error
        progress.nonfinite_steps, progress.nonfinite_row, progress.nonfinite_at = progress.nonfinite_steps + 1, row, progress.step
        progress.step += 1
        engine.run_score.last_metrics = {}
        engine.journal.write(
            "decision", step=progress.step, controller="nonfinite", old=progress.step, new=progress.step + 1,
            reason=f"skip: {error}",
        )  # fmt: skip


class SkippingUpdate(PlainUpdate):
    """`PlainUpdate` with `ppo.on_nonfinite: skip`, whose optimizer steps are taken by both roles or by neither."""

    def learn(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """See `Updating.learn`. The scorers release the batch, trained or not.

        Raises:
            NonFiniteError: a score, loss or gradient is not finite. Neither role has taken that optimizer step or a later one.
        """
        try:
            experience, parts = experience_of(engine, trained, version)
            return experience, self._train(engine, experience, version) | parts
        finally:
            engine.actor.forget()
            engine.let_go(trained)

    def _train(self, engine: Engine, experience: Experience, version: int) -> dict[str, float]:
        actor = actor_of(engine).stepwise(experience, version, engine.progress.kl_coefficient)
        self.prepare_critic(engine, experience, version)
        while True:
            of_actor, of_critic = self._advance(engine, actor, len(experience.own))
            fault = of_actor.fault or of_critic.fault
            if fault is not None:
                actor.discard()
                self.discard_critic(engine)
                raise NonFiniteError(fault)
            if of_actor.metrics is not None and of_critic.metrics is not None:
                return of_actor.metrics | of_critic.metrics

    def _advance(self, engine: Engine, actor: Stepwise, rows: int) -> tuple[Pause, Pause]:
        """Both roles take the step that is ready and compute the gradients of the next one: beside each other, or in turn."""
        self.start_critic(engine)
        early = self.wait_critic(engine) if engine.updates_in_turn else None
        with engine.trace.span("actor", "update-actor", rows=rows):
            of_actor = actor.advance()
        return of_actor, early if early is not None else self.wait_critic(engine)

    def prepare_critic(self, engine: Engine, experience: Experience, version: int) -> None:
        """Hand over the critic's share of the batch."""
        with engine.trace.span("actor", "advantages", rows=len(experience.sequences)):
            order = critic_order(experience, version)
        engine.scorers.prepare_critic_update(order)

    def start_critic(self, engine: Engine) -> None:
        """Let the critic advance, beside the actor."""
        engine.scorers.start_critic_step()

    def wait_critic(self, engine: Engine) -> Pause:
        """Where the critic's update stands then."""
        with engine.trace.wait("update"):
            return engine.scorers.wait_critic_step()

    def discard_critic(self, engine: Engine) -> None:
        """Leave out the critic's step."""
        engine.scorers.discard_critic_step()


class SkippingCriticFreeUpdate(SkippingUpdate):
    """The same for GRPO and RLOO: there is only the actor to train."""

    def prepare_critic(self, engine: Engine, experience: Experience, version: int) -> None:
        """There is no critic."""

    def start_critic(self, engine: Engine) -> None:
        """There is no critic."""

    def wait_critic(self, engine: Engine) -> Pause:
        """There is no critic, whose update is complete at once."""
        return Pause(metrics={})

    def discard_critic(self, engine: Engine) -> None:
        """There is no critic."""
