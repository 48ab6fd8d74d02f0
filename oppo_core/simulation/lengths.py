"""How long each answer will be, as a function of (seed, sequence_id) alone: the same in every schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from oppo_estimate.devices import Listed, LogNormal

Length = Callable[[int], int]
# Keeps these draws apart from those of prompts and scores, which hang on the same seed and number.
LENGTHS, SCORES = 1, 2


def drawn(seed: int, source: LogNormal | Listed, most: int) -> Length:
    """Lengths from a distribution, from 1 to `most` tokens; `most` stands for an answer that was cut off."""

    def length(sequence_id: int) -> int:
        generator = numbers(seed, LENGTHS, sequence_id)
        if isinstance(source, Listed):
            value = source.values[int(generator.integers(len(source.values)))]
        else:
            value = round(source.median * math.exp(source.sigma * generator.standard_normal()))
        return min(max(value, 1), most)

    return length


def recorded(seed: int, known: Mapping[int, int], most: int) -> Length:
    """The lengths that a run recorded; a sequence that it did not record gets one of those that it did."""
    others = drawn(seed, Listed(values=list(known.values())), most)

    def length(sequence_id: int) -> int:
        return min(known[sequence_id], most) if sequence_id in known else others(sequence_id)

    return length


def numbers(seed: int, purpose: int, sequence_id: int) -> np.random.Generator:
    """Random numbers for one purpose and one sequence."""
    return np.random.Generator(np.random.Philox(key=[seed, (purpose << 56) + sequence_id]))
