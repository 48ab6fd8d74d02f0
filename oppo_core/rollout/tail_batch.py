"""Tail batching: strictly on-policy training that does not wait for the longest responses but discards their tokens.

A step starts B+Δ responses and trains the first B that finish. The others are discarded and their prompts queued, under the same
sequence_ids and therefore with the same random numbers. Once B are queued, one step with Δ = 0 trains them and waits for all.
Whole groups are queued. See docs/algorithm.md, "Tail batching".

Invariant: every prompt ever started is in exactly one place: in flight, queued, or trained. Every token is trained under the
weights that sampled it.
"""

from __future__ import annotations

from oppo_core.rollout.pool import NewGroup, Pool
from oppo_core.rollout.sequence import Sequence


class TailBatchPool(Pool):
    """A pool that is empty between steps; `queue` holds postponed sequences in order of submission."""

    def top_up(self, overcommit: int, version: int, new: NewGroup) -> list[Sequence]:
        """Fill with B queued groups if there are enough, else with B+Δ new ones; returns the new sequences.

        A step resumed half-way with changed settings keeps the sequences it had.
        """
        if self.sequences:
            return super().top_up(len(self.sequences) // self.group_size - self.batch_size, version, new)
        if len(self.queue) < self.rows:
            return super().top_up(overcommit, version, new)
        self.overcommit = 0
        self.sequences, self.queue = self.queue[: self.rows], self.queue[self.rows :]
        return []

    def take_batch(self, finishers: list[Sequence]) -> list[Sequence]:
        """See `Pool.take_batch`; all other sequences move to `discarded` and are queued to restart from their prompt."""
        batch = super().take_batch(finishers)
        self.discarded, self.sequences = self.sequences, []
        self.queue += [s.restarted() for s in self.discarded]
        return batch

    def final(self, finishers: list[Sequence], batch: list[Sequence]) -> list[Sequence]:
        """See `Pool.final`: only trained answers are not restarted."""
        return batch
