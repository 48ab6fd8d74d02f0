"""Handling of a non-finite loss, gradient or score (`ppo.on_nonfinite`; docs/algorithm.md, "Not finite").

`raise` ends the run. `skip` skips the step: before each optimizer step both roles compute their gradients, and neither steps
unless both gradients are finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from oppo_core.ppo.critic import build_critic_update
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.stepwise import Pause, Stepwise
from oppo_core.rollout.sequence import Sequence
from oppo_core.training.optimizer import NonFiniteError
from oppo_core.update.strategies import PlainUpdate, actor_trainer, compute_experience

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine


@contextmanager
def skip_nonfinite(engine: Engine) -> Iterator[None]:
    """Context manager around a PPO step: with `skip`, a non-finite step is counted and skipped.

    Raises:
        NonFiniteError: `ppo.on_nonfinite` is raise, or `nonfinite_limit` steps in a row were non-finite.
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
    """`PlainUpdate` with `ppo.on_nonfinite: skip`: both roles take an optimizer step, or neither does."""

    def train_batch(self, engine: Engine, trained: list[Sequence], version: int) -> tuple[Experience, dict[str, float]]:
        """See `UpdateStrategy.train_batch`. The scorers release the batch even on failure.

        Raises:
            NonFiniteError: a score, loss or gradient is not finite. Neither role has taken that optimizer step or a later one.
        """
        try:
            experience, parts = compute_experience(engine, trained, version)
            return experience, self._train(engine, experience, version) | parts
        finally:
            engine.actor.forget()
            engine.release(trained)

    def _train(self, engine: Engine, experience: Experience, version: int) -> dict[str, float]:
        actor = actor_trainer(engine).stepwise(experience, version, engine.progress.kl_coefficient)
        self.prepare_critic(engine, experience, version)
        while True:
            actor_pause, critic_pause = self._advance(engine, actor, len(experience.sequences))
            fault = actor_pause.fault or critic_pause.fault
            if fault is not None:
                actor.discard()
                self.discard_critic(engine)
                raise NonFiniteError(fault)
            if actor_pause.metrics is not None and critic_pause.metrics is not None:
                return actor_pause.metrics | critic_pause.metrics

    def _advance(self, engine: Engine, actor: Stepwise, rows: int) -> tuple[Pause, Pause]:
        """Both roles take their pending step and compute the next gradients, concurrently or in turn."""
        self.start_critic(engine)
        critic_pause = self.wait_critic(engine) if engine.serialize_updates else None
        with engine.trace.span("actor", "update-actor", rows=rows):
            actor_pause = actor.advance()
        return actor_pause, critic_pause if critic_pause is not None else self.wait_critic(engine)

    def prepare_critic(self, engine: Engine, experience: Experience, version: int) -> None:
        """Send the critic's targets for the batch."""
        with engine.trace.span("actor", "advantages", rows=len(experience.sequences)):
            update = build_critic_update(experience, version)
        engine.scorers.prepare_critic_update(update)

    def start_critic(self, engine: Engine) -> None:
        """Start the critic's next step, concurrently with the actor."""
        engine.scorers.start_critic_step()

    def wait_critic(self, engine: Engine) -> Pause:
        """State of the critic's update."""
        with engine.trace.wait("update"):
            return engine.scorers.wait_critic_step()

    def discard_critic(self, engine: Engine) -> None:
        """Discard the critic's pending step."""
        engine.scorers.discard_critic_step()


class SkippingCriticFreeUpdate(SkippingUpdate):
    """`SkippingUpdate` for GRPO and RLOO, which train the actor only."""

    def prepare_critic(self, engine: Engine, experience: Experience, version: int) -> None:
        """No-op: there is no critic."""

    def start_critic(self, engine: Engine) -> None:
        """No-op: there is no critic."""

    def wait_critic(self, engine: Engine) -> Pause:
        """No critic: its update counts as complete."""
        return Pause(metrics={})

    def discard_critic(self, engine: Engine) -> None:
        """No-op: there is no critic."""
