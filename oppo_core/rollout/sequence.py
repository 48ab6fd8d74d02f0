"""One answer in the making, with everything that PPO must later know about each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Sequence:
    """A prompt and its response so far. Response arrays have one entry a token, its end-of-sequence token included.

    `sequence_id` is unique in the run and never reused; sampling randomness hangs on it, so that a repeated prompt gets
    its own. `age` counts the PPO steps for which the sequence was deferred.
    """

    sequence_id: int
    prompt_index: int
    prompt: NDArray[np.int64]
    response: list[int] = field(default_factory=list)
    behaviour_logprobs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    age: int = 0
    cohort: int = 0
    finished: bool = False
    ended_by_eos: bool = False

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.response)

    def tokens(self) -> NDArray[np.int64]:
        """Prompt and response so far, [P + length]."""
        return np.concatenate([self.prompt, np.asarray(self.response, dtype=np.int64)])
