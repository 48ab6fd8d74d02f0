"""Update overlap: answers certain to be in the batch are trained while others are decoded.

The result equals `PlainUpdate` (docs/algorithm.md, "Update overlap"). The scorer process computes gradients of early answers
(`oppo_core/scoring/early.py`); when the batch is complete each process trains the remaining rows as in plain PPO. Early answers
are chosen by token counts, never by measured time, so a run is reproducible.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from oppo_core.ppo.early_gradients import EarlyGradients
from oppo_core.ppo.experience import Experience
from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.early import EarlyBatch, EarlyTrainerProtocol
from oppo_core.update.strategies import PlainUpdate, actor_trainer

if TYPE_CHECKING:
    from oppo_core.engine.state import Engine

# Both count whole rows, prompt and response, which is what a pass computes.
MIN_PASS_TOKENS = 200  # fewer do not pay for a separate pass
# Tokens trained early per round decoded so far in a step. With more, the actor would wait for the scorer process at the end of
# decoding: that process also prefills every row, and early actor gradients take a second backward pass (docs/simulation.md).
EARLY_TOKENS_PER_ROUND = 2.2


@dataclass(slots=True)
class OverlappedUpdate(PlainUpdate):
    """`PlainUpdate` that trains early. `gradients`: shared sums for the actor, to which the scorer process adds."""

    gradients: EarlyGradients
    early_batches: list[list[int]] = field(default_factory=list)  # sequence_ids of this step's early batches
    tokens: int = 0  # in the rows of these batches, prompts included

    def begin(self, engine: Engine) -> None:
        """Reset: also in a resumed step, because gradients accumulated before the stop are lost."""
        self.early_batches, self.tokens = [], 0

    def chunk_done(self, engine: Engine, finishers: list[Sequence], version: int) -> None:
        """Train answers that are certain to be in the batch, shortest rows first, up to the token limit."""
        early, chosen = self.early, list[Sequence]()
        room = EARLY_TOKENS_PER_ROUND * engine.decoder.rounds - self.tokens
        for sequence in sorted(engine.local(engine.pool.certain(finishers)), key=lambda s: (_row(s), s.sequence_id)):
            if sequence.sequence_id not in early and _row(sequence) <= room:
                chosen.append(sequence)
                room -= _row(sequence)
        if sum(map(_row, chosen)) >= MIN_PASS_TOKENS:
            self._train_early(engine, chosen)

    def _train_early(self, engine: Engine, sequences: list[Sequence]) -> None:
        batch = EarlyBatch(sequences, engine.progress.step, engine.progress.kl_coefficient)
        cast(EarlyTrainerProtocol, engine.scorers).train_early(batch)
        self.early_batches.append([s.sequence_id for s in sequences])
        self.tokens += sum(map(_row, sequences))

    @property
    def early(self) -> Set[int]:
        return {i for ids in self.early_batches for i in ids}

    def train_actor(self, engine: Engine, experience: Experience, version: int) -> dict[str, float]:
        """Train the actor on the remaining rows and add the gradients of the early ones."""
        (mean, scale), early = experience.whitening, self.early
        rows = [row for row, sequence in enumerate(experience.sequences) if sequence.sequence_id in early]
        part = self.gradients.combine(rows, mean, scale, experience.batch.tokens)
        with engine.trace.span("actor", "update-actor", rows=len(experience.sequences) - len(rows)):
            return actor_trainer(engine).update(experience, version, engine.progress.kl_coefficient, part)


def _row(sequence: Sequence) -> int:
    """Tokens of its prompt and response."""
    return len(sequence.prompt) + sequence.length
