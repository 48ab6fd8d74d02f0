"""Scores of a finished sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of a finished sequence: one score, and a reference log-prob and a value per response token (no values without
    a critic).

    `score` is the weighted sum of `parts`, the raw scores of the reward's sources in the spec's order.
    `cached`: tokens that vLLM reward models had read before, and how many of them hit the prefix cache.
    `proximal_logprobs`: set where the scorer process also computed the actor's (update overlap).
    """

    score: float
    reference_logprobs: NDArray[np.float64]
    values: NDArray[np.float64]
    proximal_logprobs: NDArray[np.float64] | None = None
    parts: tuple[float, ...] = ()
    cached: tuple[int, int] = (0, 0)
