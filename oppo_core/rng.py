"""Every random number of a run, by what it is for: no two uses share a stream, and none depends on timing.

Philox is a counter-based generator: what it draws is a function of its key alone. The key is (seed, use · 2⁵⁶ + index), where
the index says which one of its kind: a sequence, an epoch, a step.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

INDEX_BITS = 56


class Use(IntEnum):
    """What random numbers are for. The numbers are part of what a seed means: never reuse or reorder them."""

    SAMPLING = 0
    SHUFFLING = 1
    MINI_BATCHES = 2
    EVALUATION = 3
    PRETRAINING = 4
    RETRIES = 5


def generator(seed: int, use: Use, index: int) -> np.random.Generator:
    """The numbers of one use and one index (0 ≤ index < 2⁵⁶), always from their beginning."""
    return np.random.Generator(np.random.Philox(key=[seed, (use << INDEX_BITS) + index]))
