"""The decoders of all ranks as one, so that a step decodes the same tokens with any number of ranks.

Every rank decodes the sequences that are placed on it (`Sequence.rank`), one token each per round. After each round the ranks
exchange which sequences have finished, so that all see the same finishers in the same order, (round, sequence_id), and end the
step after the same round. The tokens of a sequence are on its rank only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oppo_core.distributed.process_group import Ranks
from oppo_core.models.oom_retry import PassBudget
from oppo_core.rollout.decoder import DecoderProtocol
from oppo_core.rollout.sequence import Sequence

UNFINISHED, AT_LENGTH_LIMIT, BY_EOS, BY_STOP = range(4)


class DistributedDecoder:
    """A `DecoderProtocol` over this rank's decoder `own` and those of the other ranks.

    `live`, `rounds` and `decoded` are those of all ranks. Every rank makes the same calls.
    """

    def __init__(
        self,
        own: DecoderProtocol,
        ranks: Ranks,
        clock: Callable[[], float],
        record_wait: Callable[[float], None],
        works_ahead: bool = False,
    ) -> None:
        """Waits for other ranks are recorded, except those in which a GPU works on rounds that are queued already.

        Args:
            record_wait: records, in the running span, that this rank waited from a time on `clock`, seconds, until now.
            works_ahead: whether `own` queues rounds on a GPU before the last one's tokens are read.
        """
        self.own = own
        self.live: list[Sequence] = []
        self.rounds = 0
        self.decoded = 0
        self._ranks, self._works_ahead = ranks, works_ahead
        self._clock, self._record_wait = clock, record_wait

    @property
    def budget(self) -> PassBudget | None:
        """Of this rank's decoder, if it has one."""
        return getattr(self.own, "budget", None)

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """See `DecoderProtocol.begin`; returns the number of tokens that this rank prefilled."""
        self.live = list(sequences)
        self.rounds = self.decoded = 0
        return self.own.begin([s for s in sequences if s.rank == self._ranks.rank], version)

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """See `DecoderProtocol.advance`: stops at the first round in which a sequence of any rank finishes."""
        waited = 0.0
        finished: list[Sequence] = []
        used = 0
        while used < rounds and not finished:
            if self.own.live:
                self.own.advance(1, version)
            start = self._clock()
            finished = self._finishers()
            if not (self._works_ahead and self.own.live):
                waited += self._clock() - start
            used += 1
        # One wait for all rounds: waits of single rounds would outnumber all other spans of the step.
        self._record_wait(self._clock() - waited)
        return finished, used

    def _finishers(self) -> list[Sequence]:
        """Count one round, and return the sequences that finished in it on any rank, in sequence_id order."""
        self.rounds += 1
        self.decoded += len(self.live)
        endings = self._ranks.total_counts([_ending_code(s) if s.remote_length is None else UNFINISHED for s in self.live])
        for sequence, code in zip(self.live, endings, strict=True):
            if sequence.remote_length is not None:
                sequence.remote_length += 1
                sequence.finished = code != UNFINISHED
                sequence.ended_by_eos, sequence.stopped = code in (BY_EOS, BY_STOP), code == BY_STOP
        finished = [s for s in self.live if s.finished]
        if finished:
            self.live = [s for s in self.live if not s.finished]
        return sorted(finished, key=lambda s: s.sequence_id)

    def pause(self) -> None:
        self.own.pause()

    def save(self, folder: Path) -> None:
        self.own.save(folder)

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """Restore this rank's decoder."""
        self.own.load(folder, [s for s in sequences if s.rank == self._ranks.rank])

    def close(self) -> None:
        self.own.close()


def _ending_code(sequence: Sequence) -> int:
    if not sequence.finished:
        return UNFINISHED
    if sequence.stopped:
        return BY_STOP
    return BY_EOS if sequence.ended_by_eos else AT_LENGTH_LIMIT
