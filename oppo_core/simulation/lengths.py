"""Answer lengths as a function of (seed, sequence_id) alone, so that every schedule gets the same."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping

import numpy as np

from oppo_estimate.devices import Listed, LogNormal

Length = Callable[[int], int]
# Separate random streams for lengths and scores of the same sequence.
LENGTHS, SCORES = 1, 2


def sample_lengths(seed: int, source: LogNormal | Listed, most: int) -> Length:
    """Lengths from a distribution, from 1 to `most` tokens; `most` means a truncated answer."""

    def length(sequence_id: int) -> int:
        generator = generator_for(seed, LENGTHS, sequence_id)
        if isinstance(source, Listed):
            value = source.values[int(generator.integers(len(source.values)))]
        else:
            value = round(source.median * math.exp(source.sigma * generator.standard_normal()))
        return min(max(value, 1), most)

    return length


def recorded_lengths(seed: int, known: Mapping[int, int], most: int, begun: Mapping[int, int] | None = None) -> Length:
    """Lengths of a recorded run; a sequence that is not in the recording gets a random recorded length.

    `begun`: tokens that an answer had when the recording ended. Its length is drawn from the longer ones, since the longest
    answers are those that are unfinished at the end; where none is longer, it has one more. None: an answer that is not in the
    recording does not end.
    """
    values = sorted(known.values())

    def length(sequence_id: int) -> int:
        if sequence_id in known:
            return min(known[sequence_id], most)
        if begun is None:
            return most
        had = begun.get(sequence_id, 0)
        first = bisect_right(values, had)
        if first == len(values):
            return min(had + 1, most)
        return min(values[int(generator_for(seed, LENGTHS, sequence_id).integers(first, len(values)))], most)

    return length


def generator_for(seed: int, purpose: int, sequence_id: int) -> np.random.Generator:
    """Random generator for one purpose and one sequence."""
    return np.random.Generator(np.random.Philox(key=[seed, (purpose << 56) + sequence_id]))
