"""Tail batching: strictly on-policy training that does not wait for the longest answers, at the price of tokens thrown away.

A step starts B+Δ answers and trains the first B that finish. What the others have got so far is discarded; their prompts queue,
under the same sequence_ids and so with the same random numbers. Once B are queued, one step with Δ = 0 trains those and waits for
each. With groups, whole groups queue. docs/algorithm.md, "Tail batching".

Law: every prompt ever started is in exactly one place: in flight, queued, or trained. No token is trained by other weights than
those that sampled it.
"""

from __future__ import annotations

from oppo_core.rollout.pool import NewGroup, Pool
from oppo_core.rollout.sequence import Sequence


class TailBatchPool(Pool):
    """A pool that is empty between two steps; `queue` holds what was put off, in the order of submission."""

    def top_up(self, overcommit: int, version: int, new: NewGroup) -> list[Sequence]:
        """Fill with B queued groups when there are as many, else with B+Δ new ones; returns the new sequences.

        Where a step is begun again half-way, after a resume with other settings, it goes on with what it had.
        """
        if self.sequences:
            return super().top_up(len(self.sequences) // self.group_size - self.batch_size, version, new)
        if len(self.queue) < self.rows:
            return super().top_up(overcommit, version, new)
        self.overcommit = 0
        self.sequences, self.queue = self.queue[: self.rows], self.queue[self.rows :]
        return []

    def take_batch(self, finishers: list[Sequence]) -> list[Sequence]:
        """See `Pool.take_batch`; everything else goes to `discarded`, and its prompts into the queue, to start from nothing."""
        batch = super().take_batch(finishers)
        self.discarded, self.sequences = self.sequences, []
        self.queue += [s.anew() for s in self.discarded]
        return batch

    def settled(self, finishers: list[Sequence], batch: list[Sequence]) -> list[Sequence]:
        """See `Pool.settled`: only what is trained will not be written anew."""
        return batch
