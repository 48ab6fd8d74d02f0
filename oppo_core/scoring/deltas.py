"""Tracks how much of each sequence was sent to the scorers, and builds deltas of new tokens."""

from __future__ import annotations

from collections.abc import Iterable

from oppo_core.rollout.sequence import Sequence
from oppo_core.scoring.scorers import SequenceDelta


class DeltaTracker:
    """Builds `SequenceDelta`s in which every token is sent exactly once."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, bool]] = {}  # by sequence_id: tokens sent, and whether as finished

    def new_deltas(self, sequences: Iterable[Sequence]) -> list[SequenceDelta]:
        """Deltas of `sequences` since the last call, in sequence_id order; a first delta includes the prompt."""
        deltas = []
        for sequence in sorted(sequences, key=lambda s: s.sequence_id):
            before, _ = sent = self._sent.get(sequence.sequence_id, (0, False))
            total = len(sequence.prompt) + sequence.length
            if (total, sequence.finished) != sent:
                new = sequence.tokens_from(before)
                support = sequence.support[max(0, before - len(sequence.prompt)) :]
                deltas.append(
                    SequenceDelta(sequence.sequence_id, len(sequence.prompt), new, sequence.finished, support, sequence.stopped)
                )
                self._sent[sequence.sequence_id] = (total, sequence.finished)
        return deltas

    def forget(self, sequence_ids: Iterable[int]) -> list[int]:
        """Forget released sequences; returns those of which something was sent."""
        return [sequence_id for sequence_id in sequence_ids if self._sent.pop(sequence_id, None) is not None]

    def forget_all(self) -> None:
        """The scorers have dropped all sequences."""
        self._sent.clear()
