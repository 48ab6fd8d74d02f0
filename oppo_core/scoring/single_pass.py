"""The scorers of sequential PPO: the critic sees whole answers only, and with one optimizer step a batch it reads them once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oppo_core.models.host_device import on_host
from oppo_core.scoring.scored_sequence import Track
from oppo_core.scoring.scorers import ScorerSet


class WholeScorers(ScorerSet):
    """A `ScorerSet` whose critic's one forward pass gives the step-start values and, its graph kept, the update."""

    def _read_critic(
        self, tracks: dict[int, Track], tokens: dict[int, NDArray[np.int64]], finished: set[int], chunk: int
    ) -> None:
        """Nothing: the critic reads the batch when it is complete."""

    def start_collect(self, sequence_ids: list[int]) -> None:
        """See `Scoring.start_collect`."""
        values = self._values(sequence_ids)
        self._await_rewards(sequence_ids)
        with self.trace.span("reward", "score", rows=len(sequence_ids)):
            self._scores = self._scored(sequence_ids, values)

    def _values(self, sequence_ids: list[int]) -> list[NDArray[np.float64]]:
        """The critic's values of whole answers. Its forward pass is kept for the update."""
        assert self.trainer is not None
        rows = [self.tracks[i] for i in sequence_ids]
        with self.trace.span("critic", "critic-prefill", rows=len(rows)):
            self._held = self.trainer.hold([row.tokens for row in rows], [row.prompt_length for row in rows])
            return on_host([[row] for row in self._held.first])

    def release(self, sequence_ids: list[int]) -> None:
        """See `Scoring.release`; the kept forward pass goes with them."""
        self._held = None
        super().release(sequence_ids)
