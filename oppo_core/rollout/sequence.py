"""One answer in the making, with everything that PPO must later know about each of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

# What each token was sampled among (oppo_core/rollout/support.py): sorted ids, or bits; empty where nothing is filtered.
Support = list[NDArray[np.int32] | NDArray[np.uint8]]


@dataclass(slots=True)
class Sequence:
    """A prompt and its response so far. Response arrays have one entry a token, its end-of-sequence token included.

    `sequence_id` is unique in the run and never reused; sampling randomness hangs on it, so that a repeated prompt gets
    its own. `age` counts the PPO steps for which the sequence was deferred. `support` has one entry a token where sampling
    filters are on, and none where they are off. `stale_logprobs` (update overlap only) are the
    log-probs that this step's weights give to the tokens of earlier steps.
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
    support: Support = field(default_factory=list)
    stale_logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.response)

    def anew(self) -> Sequence:
        """The same sequence before its first token: it will use the same random numbers."""
        return Sequence(self.sequence_id, self.prompt_index, self.prompt, cohort=self.cohort)

    def proximal(self) -> list[float]:
        """Log-probs of the response under the weights of this step, for a sequence that was read anew at its start.

        Tokens of earlier steps have them from that reading (`stale_logprobs`), tokens of this step from their sampling.
        """
        return self.stale_logprobs + self.behaviour_logprobs[len(self.stale_logprobs) :]

    def tokens(self) -> NDArray[np.int64]:
        """Prompt and response so far, [P + length]."""
        return self.tokens_from(0)

    def tokens_from(self, position: int) -> NDArray[np.int64]:
        """The same without the first `position` tokens, at the cost of what is left."""
        rest = self.response[max(0, position - len(self.prompt)) :]
        return np.concatenate([self.prompt[position:], np.asarray(rest, dtype=np.int64)])
