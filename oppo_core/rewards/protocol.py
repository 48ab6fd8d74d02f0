"""A finished answer, and the interface of rewards of finished answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from oppo_core.rollout.chat import Message
from oppo_core.rollout.conversations import prompt_text
from oppo_core.rollout.tokenizer import TextCodec


@dataclass(frozen=True)
class Answer:
    """One finished answer. Texts are decoded on access, without special tokens.

    `stopped`: by a stop condition. `messages`: the turns of a prompt that is a conversation, each with `role` and `content`.
    """

    sequence_id: int
    prompt_ids: list[int]
    response_ids: list[int]
    codec: TextCodec
    stopped: bool = False
    messages: list[Message] | None = None

    @cached_property
    def prompt(self) -> str:
        """The prompt's text; of a conversation the last user turn."""
        return prompt_text(self.prompt_ids, self.messages, self.codec)

    @cached_property
    def response(self) -> str:
        """The response's text."""
        return self.codec.decode(self.response_ids)

    @cached_property
    def text(self) -> str:
        """Prompt and response decoded together: a tokenizer may put another space between them than concatenation."""
        return self.codec.decode(self.prompt_ids + self.response_ids)

    @property
    def ended(self) -> bool:
        """Whether it ended with EOS or by a stop condition; otherwise it reached the length limit."""
        return self.stopped or self.response_ids[-1:] == [self.codec.eos]


class FinishedReward(Protocol):
    """Finished answers in, one raw score each out."""

    @property
    def is_remote(self) -> bool:
        """Whether the work is done in another process or service."""

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        """Submit answers in sequence_id order. Returns at once if the reward is remote; otherwise computes, calling `alive`."""

    def wait(self, sequence_ids: list[int], timeout_s: float) -> bool:
        """Wait at most so many seconds; returns whether all have a score. Raises RewardError when the reward failed."""

    def score(self, sequence_id: int) -> float:
        """The score of an answer that has one."""

    def forget(self, sequence_id: int) -> None:
        """The answer is trained, or its scores are dropped; it may be submitted again."""

    def close(self) -> None:
        """Release all resources."""


class StreamingReward(FinishedReward, Protocol):
    """A reward that reads unfinished answers remotely, so that little is left to read at their end."""

    def read_partial(self, tokens: dict[int, NDArray[np.int64]]) -> None:
        """Begin to read the new tokens of unfinished sequences, given whole, prompt first. Returns at once."""

    def cached(self, sequence_id: int) -> tuple[int, int]:
        """Tokens of a sequence that had been prefilled before, and those of them that were still cached."""


class SynchronousReward:
    """Base of rewards that compute scores in `start`."""

    is_remote = False

    def __init__(self) -> None:
        self._scores: dict[int, float] = {}

    def wait(self, sequence_ids: list[int], timeout_s: float) -> bool:
        """Scores exist since `start`."""
        return True

    def score(self, sequence_id: int) -> float:
        return self._scores[sequence_id]

    def forget(self, sequence_id: int) -> None:
        self._scores.pop(sequence_id, None)

    def close(self) -> None:
        pass
