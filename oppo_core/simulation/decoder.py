"""A decoder that knows every answer's length in advance and advances the clock from one finished answer to the next.

Each placeholder token is the policy version under which it was "sampled", from which the scorers compute staleness.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oppo_core.rollout.sequence import Sequence
from oppo_core.simulation.lengths import Length
from oppo_core.simulation.machine import Machine


class SimulatedDecoder:
    """A `DecoderProtocol` that moves the clock instead of computing."""

    def __init__(self, machine: Machine, length: Length, most: int, keeps_cache: bool) -> None:
        """`most`: longest answer, tokens; `keeps_cache`: deferred answers keep their KV cache under new weights."""
        self.live: list[Sequence] = []
        self.rounds = 0
        self.decoded = 0
        self._machine = machine
        self._length = length
        self._most = most
        self._keeps_cache = keeps_cache
        self._cached: set[int] = set()
        # Of each live sequence: tokens to its end, cached tokens, and rank. Of each rank: rows when the step began.
        self._left, self._tokens, self._ranks, self._widths = (np.zeros(0, dtype=np.int64) for _ in range(4))

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        """Costs the transfer of new weights and one prefill pass over the sequences without a valid cache."""
        self.live = list(sequences)
        self.rounds = self.decoded = 0
        self._left = np.array([self._length(s.sequence_id) - s.length for s in sequences], dtype=np.int64)
        self._tokens = np.array([len(s.prompt) + s.length for s in sequences], dtype=np.int64)
        self._ranks = np.array([s.rank or 0 for s in sequences], dtype=np.int64)
        self._widths = np.bincount(self._ranks, minlength=self._machine.world)
        read = [s for s in sequences if not (self._keeps_cache and s.length and s.sequence_id in self._cached)]
        for sequence in read if self._keeps_cache else ():
            sequence.kept_version = version
        self._cached = {s.sequence_id for s in sequences}
        lengths = [len(s.prompt) + s.length - 1 for s in read]
        loads = self._machine.loads(lengths, [s.rank or 0 for s in read])
        prefill_us = self._machine.prefill_us(self._machine.devices.costs.actor, loads)
        self._machine.work(self._machine.devices.overheads.weights_us + prefill_us)
        return sum(lengths)

    def pause(self) -> None:
        pass

    def close(self) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass

    def load(self, folder: Path, sequences: list[Sequence]) -> None:
        """Unfinished sequences count as cached."""
        self._cached = {s.sequence_id for s in sequences if not s.finished}

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """Costs the rounds; with padding, over all rows that were live when the step began."""
        used = min([rounds, *self._left.tolist()])
        count = len(self.live)
        self._machine.work(self._machine.decode_us(used, self._tokens, self._widths, self._ranks))
        self._left -= used
        self._tokens += used
        self.rounds += used
        self.decoded += used * count
        versions, zeros = [version] * used, [0.0] * used
        for sequence in self.live:
            sequence.response += versions
            sequence.behaviour_logprobs += zeros
            sequence.token_versions += versions
        ended = self._left == 0
        done = [self.live[place] for place in np.flatnonzero(ended)]
        for sequence in done:
            sequence.finished = True
            sequence.ended_by_eos = sequence.length < self._most
        if done:
            self.live = [s for s in self.live if not s.finished]
            self._left, self._tokens, self._ranks = (values[~ended] for values in (self._left, self._tokens, self._ranks))
        return sorted(done, key=lambda s: s.sequence_id), used
