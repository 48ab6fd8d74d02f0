"""A sequence: a prompt and its response so far, with the per-token data that PPO needs."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Per sampled token, the tokens that sampling filters kept: ids or a bit mask (sampling_support.py). Empty without filters.
Support = list[NDArray[np.int32] | NDArray[np.uint8]]
Ending = Literal["eos", "stop", "length"]


@dataclass(slots=True)
class Sequence:
    """A prompt and its response so far. Response lists have one entry per token, the end-of-sequence token included.

    `sequence_id` is unique in the run and never reused; it keys the random numbers, so a repeated prompt gets new ones.
    `age` counts the PPO steps for which the sequence was deferred. `ended_by_eos`: it ended by the end-of-sequence token or by a
    stop condition (then `stopped` is set too), not at the length limit. `support` has one entry per token with sampling filters,
    else none. `stale_logprobs`: log-probs of earlier steps' tokens under this step's weights, where the decoder
    `scores_stale_tokens`. `kept_version`: the policy version that computed the oldest entries of its KV cache when the cache is
    kept across updates (`kv_after_update: keep`), else None. `cohort`: the policy version at which it was started.

    `rank`: the one that decodes it and has its tokens; None before it is placed, and in a run of one rank. `remote_length`: on
    the other ranks, which have no tokens of it, the number of its response tokens so far; else None.
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
    rank: int | None = None
    remote_length: int | None = None

    @property
    def length(self) -> int:
        """Response tokens so far."""
        return len(self.response) if self.remote_length is None else self.remote_length

    @property
    def ending(self) -> Ending | None:
        """Finish reason; None while unfinished."""
        if not self.finished:
            return None
        if self.stopped:
            return "stop"
        return "eos" if self.ended_by_eos else "length"

    def reads_stale(self, version: int) -> bool:
        """Whether its KV cache holds entries of weights older than `version`."""
        return self.kept_version is not None and self.kept_version < version

    def stale_tokens(self, version: int) -> int:
        """Number of leading tokens sampled under weights older than `version` or with a KV cache of such weights."""
        return self.length if self.reads_stale(version) else bisect_left(self.token_versions, version)

    def restarted(self) -> Sequence:
        """The same sequence before its first token, with the same random numbers."""
        return Sequence(self.sequence_id, self.prompt_index, self.prompt, cohort=self.cohort)

    def proximal(self) -> list[float]:
        """Log-probs of the response under this step's weights, for a sequence whose KV cache is of this step.

        `stale_logprobs` for tokens of earlier steps, log-probs from sampling for tokens of this step.
        """
        return self.stale_logprobs + self.behaviour_logprobs[len(self.stale_logprobs) :]

    def tokens(self) -> NDArray[np.int64]:
        """Prompt and response so far, [P + length]."""
        return self.tokens_from(0)

    def tokens_from(self, position: int) -> NDArray[np.int64]:
        """`tokens()` without the first `position` tokens; costs only the tokens returned."""
        response = self.response[max(0, position - len(self.prompt)) :]
        return np.concatenate([self.prompt[position:], np.asarray(response, dtype=np.int64)])
