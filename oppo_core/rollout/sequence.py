"""One answer in the making, with everything that PPO must later know about each of its tokens."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# What each token was sampled among (oppo_core/rollout/sampling_support.py): sorted ids, or bits; empty where nothing is filtered.
Support = list[NDArray[np.int32] | NDArray[np.uint8]]
Ending = Literal["eos", "stop", "length"]


@dataclass(slots=True)
class Sequence:
    """A prompt and its response so far. Response arrays have one entry a token, its end-of-sequence token included.

    `sequence_id` is unique in the run and never reused; sampling randomness hangs on it, so that a repeated prompt gets
    its own. `age` counts the PPO steps for which the sequence was deferred. `ended_by_eos`: it ended by itself and not at the
    length limit, with the end-of-sequence token or, then it is `stopped` too, by a stop condition. `support` has one entry a
    token where sampling filters are on, and none where they are off. `stale_logprobs` (where the decoder `rates_stale`) are the
    log-probs that this step's weights give to the tokens of earlier steps. `kept_version`: the policy version that computed the
    first of its cached keys and values, where these outlive an update (`kv_after_update: keep`); None where they are recomputed.
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
    stopped: bool = False
    kept_version: int | None = None
    support: Support = field(default_factory=list)
    stale_logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.response)

    @property
    def ending(self) -> Ending | None:
        """What ended the answer; None while it goes on."""
        if not self.finished:
            return None
        if self.stopped:
            return "stop"
        return "eos" if self.ended_by_eos else "length"

    def reads_stale(self, version: int) -> bool:
        """Whether keys and values of weights older than `version` are among those that its tokens are sampled with."""
        return self.kept_version is not None and self.kept_version < version

    def stale_tokens(self, version: int) -> int:
        """How many tokens, counted from the first, were sampled under weights older than `version` or after such a cache."""
        return self.length if self.reads_stale(version) else bisect_left(self.token_versions, version)

    def anew(self) -> Sequence:
        """The same sequence before its first token: it will use the same random numbers."""
        return Sequence(self.sequence_id, self.prompt_index, self.prompt, cohort=self.cohort)

    def proximal(self) -> list[float]:
        """Log-probs of the response under the weights of this step, for a sequence whose cache is of this step.

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
