"""The pool: which sequences are in flight, which make up the batch, which are deferred. Pure bookkeeping, no tensors.

Law: every sequence ever started is in exactly one place: in the pool, in one trained batch, or (at the end of the run) in
the final checkpoint. docs/algorithm.md, steps 1, 3 and 5; the paper's inter-step overlap (arXiv 2509.25762, §3.2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from oppo_core.rollout.sequence import Sequence


@dataclass(slots=True)
class Pool:
    """Sequences in flight in FIFO order: oldest first, ties by sequence_id."""

    batch_size: int
    max_age: int
    sequences: list[Sequence] = field(default_factory=list)
    started: int = 0

    def top_up(self, overcommit: int, version: int, new: Callable[[int], Sequence]) -> list[Sequence]:
        """Fill up to B+Δ with sequences made by `new(sequence_id)`; returns the new ones. A lowered Δ evicts nothing."""
        fresh = []
        while len(self.sequences) < self.batch_size + overcommit:
            sequence = new(self.started)
            sequence.cohort = version
            self.started += 1
            self.sequences.append(sequence)
            fresh.append(sequence)
        return fresh

    def unfinished(self) -> list[Sequence]:
        """What the decoder works on, in FIFO order."""
        return [s for s in self.sequences if not s.finished]

    def overdue(self) -> list[Sequence]:
        """Sequences that must be in this step's batch, finished or not."""
        return [s for s in self.sequences if s.age >= self.max_age]

    def take_batch(self, finishers: list[Sequence]) -> list[Sequence]:
        """Remove and return this step's batch of B, in sequence_id order, and age what stays.

        Args:
            finishers: the sequences that finished in this step, in order of (decode step, sequence_id).

        Raises:
            RuntimeError: fewer than B are ready, or an overdue one is unfinished: the decoder stopped too early.
        """
        ready = self._in_batch_order(finishers)
        batch = ready[: self.batch_size]
        if len(batch) < self.batch_size or any(not s.finished for s in batch):
            raise RuntimeError(f"the batch of {self.batch_size} is not complete: {sum(s.finished for s in ready)} are ready")
        taken = {s.sequence_id for s in batch}
        self.sequences = [s for s in self.sequences if s.sequence_id not in taken]
        for sequence in self.sequences:
            sequence.age += 1
        return sorted(batch, key=lambda s: s.sequence_id)

    def is_complete(self, finishers: list[Sequence]) -> bool:
        """Whether `take_batch(finishers)` would succeed."""
        overdue = self.overdue()
        if any(not s.finished for s in overdue):
            return False
        return len(self._in_batch_order(finishers)) >= self.batch_size

    def certain(self, finishers: list[Sequence]) -> list[Sequence]:
        """Finished sequences that will be in this step's batch whatever finishes after `finishers`."""
        return [s for s in self._in_batch_order(finishers)[: self.batch_size] if s.finished]

    def _in_batch_order(self, finishers: list[Sequence]) -> list[Sequence]:
        overdue = self.overdue()
        new = {s.sequence_id for s in finishers} | {s.sequence_id for s in overdue}
        surplus = [s for s in self.sequences if s.finished and s.sequence_id not in new]
        late = {s.sequence_id for s in overdue}
        return overdue + surplus + [s for s in finishers if s.sequence_id not in late]
