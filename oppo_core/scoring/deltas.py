"""What the scorers have been told of each sequence, and what is news to them."""

from __future__ import annotations

from collections.abc import Iterable

from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.scorers import Growth


class Handover:
    """Turns sequences into `Growth`s, each token told once."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, bool]] = {}

    def news(self, sequences: Iterable[Sequence]) -> list[Growth]:
        """What is new of `sequences`, in sequence_id order; the first time prompt and all."""
        growths = []
        for sequence in sorted(sequences, key=lambda s: s.sequence_id):
            before, _ = told = self._told.get(sequence.sequence_id, (0, False))
            total = len(sequence.prompt) + sequence.length
            if (total, sequence.finished) != told:
                new = sequence.tokens_from(before)
                support = sequence.support[max(0, before - len(sequence.prompt)) :]
                growths.append(
                    Growth(sequence.sequence_id, len(sequence.prompt), new, sequence.finished, support, sequence.stopped)
                )
                self._told[sequence.sequence_id] = (total, sequence.finished)
        return growths

    def forget(self, sequence_ids: Iterable[int]) -> list[int]:
        """The scorers let go of these; returns those that they had been told of."""
        return [sequence_id for sequence_id in sequence_ids if self._told.pop(sequence_id, None) is not None]

    def forget_all(self) -> None:
        """The scorers hold nothing any more."""
        self._told.clear()
