"""Scorers of sequential PPO: with one optimizer step per batch, one critic pass gives both values and the update."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oppo_contract.spec import RunSpec
from oppo_core.models.host_device import on_host
from oppo_core.scoring.scored_sequence import ScoredSequence
from oppo_core.scoring.scorers import ScorerSet


def reads_critic_once(spec: RunSpec) -> bool:
    """Whether a critic with whole weights reads an answer once, when it is whole, for its values and its update."""
    return spec.ppo.has_critic and spec.ppo.optimizer_steps == 1 and spec.overlap.intra_step == "off"


class SinglePassScorers(ScorerSet):
    """A `ScorerSet` whose critic reads whole answers once: values at step start, and the retained graph for the update."""

    def _read_critic(
        self, sequences: dict[int, ScoredSequence], tokens: dict[int, NDArray[np.int64]], finished: set[int], chunk: int
    ) -> None:
        """No-op: the critic reads the batch when it is complete."""

    def start_collect(self, sequence_ids: list[int]) -> None:
        values, rewards = self._values(sequence_ids), self._rewards(sequence_ids)
        with self.trace.span("reward", "score", rows=len(sequence_ids)):
            self._scores = self._scored(sequence_ids, values, rewards)

    def _values(self, sequence_ids: list[int]) -> list[NDArray[np.float64]]:
        """The critic's values of whole answers. Retains the forward pass for an update of one optimizer step."""
        assert self.trainer is not None
        rows = [self.sequences[i] for i in sequence_ids]
        with self.trace.span("critic", "critic-prefill", rows=len(rows)):
            forward = self.trainer.forward([row.tokens for row in rows], [row.prompt_length for row in rows])
            self._retained = forward if self.trainer.ppo.optimizer_steps == 1 else None
            values = self.trainer.budget.run("the critic's forward pass", lambda: forward.first)
            return on_host([[row] for row in values])
