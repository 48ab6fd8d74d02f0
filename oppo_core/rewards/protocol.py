"""A finished answer as a reward sees it, and what every reward of finished answers can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from oppo_core.rollout.tokenizer import TextCodec


@dataclass(frozen=True)
class Answer:
    """One finished answer. Texts are decoded when somebody asks, special tokens left out. `stopped`: by a stop condition."""

    sequence_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    codec: TextCodec
    stopped: bool = False

    @cached_property
    def prompt(self) -> str:
        """The prompt's text."""
        return self.codec.decode(self.prompt_ids)

    @cached_property
    def response(self) -> str:
        """The response's text."""
        return self.codec.decode(self.response_ids)

    @cached_property
    def whole(self) -> str:
        """Both in one: a tokenizer may put another space between them than a plain sum has."""
        return self.codec.decode(self.prompt_ids + self.response_ids)

    @property
    def ended(self) -> bool:
        """Whether it ended by itself, with the end-of-sequence token or by a stop condition; otherwise the length limit did."""
        return self.stopped or self.response_ids[-1:] == [self.codec.eos]


class FinishedReward(Protocol):
    """Finished answers in, one raw score each out."""

    @property
    def elsewhere(self) -> bool:
        """Whether the work is done elsewhere, while this process goes on."""

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        """Take over answers, in sequence_id order. Returns at once where others do the work; else calls `alive` in it."""

    def wait(self, sequence_ids: list[int], timeout_s: float) -> bool:
        """Returns whether all of these have a score, after so many seconds at most. Raises RewardError when the reward failed."""

    def score(self, sequence_id: int) -> float:
        """The score of an answer that has one."""

    def forget(self, sequence_id: int) -> None:
        """The answer is trained, or its scores are dropped; it may be started again."""

    def close(self) -> None:
        """Let go of everything."""


class GrowingReward(FinishedReward, Protocol):
    """One that reads answers elsewhere while they are written, so that of a finished one little is left to read."""

    def read_on(self, tokens: dict[int, NDArray[np.int64]]) -> None:
        """Begin to read what is new of unfinished sequences, given whole, prompt first. Returns at once."""

    def cached(self, sequence_id: int) -> tuple[int, int]:
        """Tokens of a sequence that had been read before when it was read on, and those of them that were still known."""


class ScoredAtOnce:
    """Base of the rewards that compute their scores on the spot: those keep them here."""

    elsewhere = False

    def __init__(self) -> None:
        self._scores: dict[int, float] = {}

    def wait(self, sequence_ids: list[int], timeout_s: float) -> bool:
        """True: they were scored when they were started."""
        return True

    def score(self, sequence_id: int) -> float:
        """See `FinishedReward.score`."""
        return self._scores[sequence_id]

    def forget(self, sequence_id: int) -> None:
        """See `FinishedReward.forget`."""
        self._scores.pop(sequence_id, None)

    def close(self) -> None:
        """Nothing to let go of."""
