"""Scorer-side state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.rollout.sequence import Support


@dataclass(slots=True)
class ScoredSequence:
    """The tokens of one sequence received so far, and the log-probs and values computed for them."""

    prompt_length: int
    tokens: NDArray[np.int64]
    finished: bool = False
    support: Support = field(default_factory=list)
    reference_logprobs: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    stopped: bool = False  # whether a stop condition ended it
