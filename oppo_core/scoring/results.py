"""What the scorers say of a finished sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Scored:
    """A finished sequence's scores: one number, and one reference log-prob and one value a response token;
    no values without a critic.

    `score` is the weighted sum of `parts`, the raw scores of the reward's sources in the spec's order.
    `cached`: tokens that reward models elsewhere had read before, and those of them that they still knew (vLLM's prefix cache).
    `proximal_logprobs` where the scorers' process has also computed the actor's (update overlap).
    """

    score: float
    reference_logprobs: NDArray[np.float64]
    values: NDArray[np.float64]
    proximal_logprobs: NDArray[np.float64] | None = None
    parts: tuple[float, ...] = ()
    cached: tuple[int, int] = (0, 0)
