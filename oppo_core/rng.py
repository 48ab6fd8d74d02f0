"""Random streams of a run, one per use and index, reproducible and independent of timing.

Philox is a counter-based generator: its numbers are a function of its key. The key is (seed, use · 2⁵⁶ + index), where the index
is the number of a sequence, an epoch or a step.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

INDEX_BITS = 56


class Use(IntEnum):
    """Use of a random stream. Never reuse or reorder the values: they are part of the meaning of a seed."""

    SAMPLING = 0
    SHUFFLING = 1
    MINI_BATCHES = 2
    EVALUATION = 3
    PRETRAINING = 4
    RETRIES = 5


def generator(seed: int, use: Use, index: int) -> np.random.Generator:
    """A new generator at the start of the stream for one use and index (0 ≤ index < 2⁵⁶)."""
    return np.random.Generator(np.random.Philox(key=[seed, (use << INDEX_BITS) + index]))
