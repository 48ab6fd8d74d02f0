"""Update overlap: answers that are certain to be in the batch are trained while others are decoded.

It computes the same as `PlainUpdate` (docs/algorithm.md, "Update overlap"). The scorers' process trains early answers
(`oppo_core/scoring/early.py`), and when the batch is complete each process trains the rest as in plain PPO. Which answers are
early follows from counted tokens, never from measured time, so that a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from oppo_core.ppo.early_gradients import EarlyGradients
from oppo_core.ppo.experience import Experience
from oppo_core.ppo.losses import whitening
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.early import EarlyOrder, EarlyTraining
from oppo_core.update.strategies import PlainUpdate, actor_of

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine

SMALLEST_PASS_TOKENS = 192  # fewer response tokens are not worth a pass of their own
# Tokens trained early for each round decoded so far in a step. With more the actor would wait at the end of decoding: until then
# the scorers' process also reads every answer, and training the actor early takes a second backward pass (docs/simulation.md).
EARLY_TOKENS_A_ROUND = 2


@dataclass(slots=True)
class OverlappedUpdate(PlainUpdate):
    """`PlainUpdate` that trains early. `gradients`: of the actor, to which the scorers' process adds."""

    gradients: EarlyGradients
    orders: list[list[int]] = field(default_factory=list)  # this step's, by sequence_id
    tokens: int = 0  # in these orders

    def begin(self, engine: Engine) -> None:
        """Nothing is trained early yet, also in a step that is resumed: what was accumulated before the stop is lost."""
        self.orders, self.tokens = [], 0

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """Order the training of answers that are certain to be in the batch, shortest first, as far as the limit goes."""
        early, chosen = self.early, list[Sequence]()
        room = EARLY_TOKENS_A_ROUND * engine.decoder.rounds - self.tokens
        for sequence in sorted(engine.pool.certain(finishers), key=lambda s: (s.length, s.sequence_id)):
            if sequence.sequence_id not in early and sequence.length <= room:
                chosen.append(sequence)
                room -= sequence.length
        if sum(s.length for s in chosen) >= SMALLEST_PASS_TOKENS:
            self._order(engine, chosen)

    def _order(self, engine: Engine, sequences: list[Sequence]) -> None:
        order = EarlyOrder(sequences, engine.progress.step, engine.progress.kl_coefficient)
        cast(EarlyTraining, engine.scorers).train_early(order)
        self.orders.append([s.sequence_id for s in sequences])
        self.tokens += sum(s.length for s in sequences)

    @property
    def early(self) -> Set[int]:
        """See `PlainUpdate.early`."""
        return {i for ids in self.orders for i in ids}

    def train_actor(self, engine: Engine, experience: Experience, version: int) -> dict[str, float]:
        """Train the actor on the rest, with the gradients of what was trained early."""
        ppo, mask = engine.spec.ppo, experience.mask
        mean, scale = whitening(experience.raw_advantages, mask) if ppo.whiten_advantages else (0.0, 1.0)
        early = self.early
        rows = [row for row in experience.own if experience.sequences[row].sequence_id in early]
        part = self.gradients.combine(rows, mean, scale, int(mask.sum()))
        with engine.trace.span("actor", "update-actor", rows=len(experience.own) - len(rows)):
            return actor_of(engine).update(experience, version, engine.progress.kl_coefficient, part)
