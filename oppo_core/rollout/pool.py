"""The pool of B+Δ sequences: in flight, taken as the batch, or deferred. Pure bookkeeping, no tensors.

Its unit is the group: the G responses to one prompt, which are started, trained and deferred together (G = 1 in PPO; GRPO and
RLOO need G > 1). Group g holds sequences g·G to g·G + G − 1. B, Δ, ages and finishing order count groups.

Invariant: every sequence ever started is in exactly one place: in the pool, in one trained batch, dropped by dynamic sampling, or
(at the end of the run) in the final checkpoint. docs/algorithm.md, steps 1, 3 and 5; the paper's inter-step overlap (arXiv
2509.25762, §3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from oppo_core.rollout.sequence import Sequence

Group = list[Sequence]
NewGroup = Callable[[range], Group]  # builds the answers to one prompt from their sequence_ids


@dataclass(slots=True)
class Pool:
    """Sequences in flight in FIFO order: oldest group first, by sequence_id.

    `overcommit` is the Δ of the current step. `queue` and `discarded` are used only by tail batching
    (`oppo_core/rollout/tail_batch.py`). `next_group` is the number of the next group to start. `skipped`: lower numbers that
    were never started and come first; only in runs resumed from a checkpoint of several ranks before format 7.

    There is one pool for all ranks. Every rank has an equal copy, in which sequences of other ranks have a length, but no tokens
    (`Sequence.remote_length`).
    """

    batch_size: int
    max_age: int
    group_size: int = 1
    sequences: list[Sequence] = field(default_factory=list)
    overcommit: int = 0
    queue: list[Sequence] = field(default_factory=list)
    discarded: list[Sequence] = field(default_factory=list)
    next_group: int = 0
    skipped: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Answers trained per step, B·G."""
        return self.batch_size * self.group_size

    @property
    def capacity(self) -> int:
        """Capacity of the current step in answers, (B+Δ)·G."""
        return self.rows + self.overcommit * self.group_size

    @property
    def started(self) -> int:
        """Sequences started so far."""
        return (self.next_group - len(self.skipped)) * self.group_size

    @property
    def unconsumed(self) -> int:
        """Answers started and not trained yet."""
        return len(self.sequences) + len(self.queue)

    def top_up(self, overcommit: int, version: int, new: NewGroup) -> list[Sequence]:
        """Fill up to B+Δ groups, built by `new(sequence_ids)`; returns the new sequences. A lower Δ evicts nothing."""
        self.overcommit = overcommit
        fresh: list[Sequence] = []
        while len(self.sequences) < self.capacity:
            group = new(self._next_ids())
            for sequence in group:
                sequence.cohort = version
            self.sequences += group
            fresh += group
        return fresh

    def _next_ids(self) -> range:
        if self.skipped:
            number = self.skipped.pop(0)
        else:
            number, self.next_group = self.next_group, self.next_group + 1
        return range(number * self.group_size, (number + 1) * self.group_size)

    def unfinished(self) -> list[Sequence]:
        """Sequences still to be decoded, in FIFO order."""
        return [s for s in self.sequences if not s.finished]

    def overdue(self) -> list[Sequence]:
        """Sequences at the maximum age, which must be in this step's batch, finished or not."""
        return [s for s in self.sequences if s.age >= self.max_age]

    def take_batch(self, finishers: list[Sequence]) -> list[Sequence]:
        """Remove and return this step's batch of B groups in sequence_id order; increments the age of the rest.

        Args:
            finishers: sequences that finished in this step, in order of (decode step, sequence_id).

        Raises:
            RuntimeError: fewer than B groups are ready, or an overdue one is unfinished: decoding stopped too early.
        """
        ready = self.batch_groups(finishers)
        batch = [s for group in ready for s in group]
        if len(batch) < self.rows or any(not s.finished for s in batch):
            raise RuntimeError(f"the batch of {self.batch_size} is not complete: {sum(map(_finished, ready))} are ready")
        self.drop({s.sequence_id for s in batch})
        for sequence in self.sequences:
            sequence.age += 1
        return sorted(batch, key=lambda s: s.sequence_id)

    def final(self, finishers: list[Sequence], batch: list[Sequence]) -> list[Sequence]:
        """Responses that will not be restarted, for length statistics, given this step's `finishers` and the `batch` taken."""
        return finishers

    def is_complete(self, finishers: list[Sequence]) -> bool:
        """Whether `take_batch(finishers)` would succeed."""
        if sum(s.finished for s in self.sequences) < self.rows:
            return False  # asked at every finisher of a step: the ordering below is for those that may complete the batch
        if any(not s.finished for s in self.overdue()):
            return False
        return len(self._in_batch_order(finishers)) >= self.batch_size

    def batch_groups(self, finishers: list[Sequence]) -> list[Group]:
        """The groups that `take_batch(finishers)` would return, in batch order."""
        return self._in_batch_order(finishers)[: self.batch_size]

    def drop(self, sequence_ids: Container[int]) -> None:
        """Remove sequences that are not trained."""
        self.sequences = [s for s in self.sequences if s.sequence_id not in sequence_ids]

    def certain(self, finishers: list[Sequence]) -> list[Sequence]:
        """Finished sequences that are in this step's batch no matter what finishes after `finishers`."""
        return [s for group in self.batch_groups(finishers) for s in group if s.finished]

    def _in_batch_order(self, finishers: list[Sequence]) -> list[Group]:
        """Overdue groups, then finished surplus (both oldest first), then groups completed by `finishers`."""
        groups: dict[int, Group] = {}
        for sequence in self.sequences:
            groups.setdefault(sequence.sequence_id // self.group_size, []).append(sequence)
        # Groups in the order in which their last member finished.
        ended = list(dict.fromkeys(s.sequence_id // self.group_size for s in reversed(finishers)))[::-1]
        late = {number for number, group in groups.items() if group[0].age >= self.max_age}
        surplus = groups.keys() - late - set(ended)
        order = [n for n in groups if n in late] + [n for n in groups if n in surplus and _finished(groups[n])]
        return [groups[n] for n in order + [n for n in ended if n not in late and _finished(groups[n])]]


def _finished(group: Group) -> bool:
    return all(s.finished for s in group)
