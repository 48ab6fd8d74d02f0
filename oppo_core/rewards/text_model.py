"""A reward model that reads text, because its tokenizer or chat template differs from the actor's.

It cannot be streamed: a finished answer is decoded, tokenized again and read in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oppo_core.models.microbatching import ragged_batches, right_padded
from oppo_core.models.oom_retry import PassBudget
from oppo_core.models.protocol import Network
from oppo_core.rewards.errors import RewardError
from oppo_core.rewards.prompt_records import MESSAGES, PromptRecords
from oppo_core.rewards.protocol import Answer, SynchronousReward

Encode = Callable[[Answer], list[int]]


class TextModelReward(SynchronousReward):
    """A network with its text encoder."""

    def __init__(self, network: Network, encode: Encode, budget: PassBudget) -> None:
        """`budget`: padded tokens per forward pass."""
        super().__init__()
        self._network, self._encode, self.budget = network, encode, budget

    def start(self, answers: list[Answer], alive: Callable[[], None]) -> None:
        """Score the answers.

        Raises:
            RewardError: an answer is longer than the model's context.
            MemoryShortError: out of memory even with one answer per pass.
        """
        rows = {answer.sequence_id: self._tokens(answer) for answer in answers}
        for sequence_id in rows:
            self.forget(sequence_id)
        self.budget.run("the text reward's reading", lambda: self._read_rest(rows, alive))

    @torch.no_grad()
    def _read_rest(self, rows: dict[int, NDArray[np.int64]], alive: Callable[[], None]) -> None:
        """Score those of `rows`, tokens by sequence_id, that have no score yet."""
        left = [sequence_id for sequence_id in rows if sequence_id not in self._scores]
        device = next(self._network.parameters()).device
        for group in ragged_batches([len(rows[sequence_id]) for sequence_id in left], self.budget.tokens):
            chosen = [left[number] for number in group]
            padded = right_padded([rows[sequence_id] for sequence_id in chosen]).to(device)
            hidden = self._network.hidden(padded, torch.arange(padded.shape[1], device=device).expand_as(padded))
            for states, sequence_id in zip(hidden, chosen, strict=True):
                self._scores[sequence_id] = float(self._network.scalar(states[len(rows[sequence_id]) - 1]))
            alive()

    def _tokens(self, answer: Answer) -> NDArray[np.int64]:
        tokens = np.asarray(self._encode(answer), dtype=np.int64)
        if not 0 < len(tokens) <= self._network.context:
            raise RewardError(
                f"sequence {answer.sequence_id}, {len(answer.prompt_ids)} + {len(answer.response_ids)} tokens of the actor, has"
                f" {len(tokens)} in the reward model's tokenizer; its context is {self._network.context}. Lower"
                " rollout.max_prompt_tokens or rollout.max_new_tokens, or take a reward model with more context"
            )
        return tokens


def text_encoder(source: Path | str) -> Encode:
    """Prompt and response as one text, with the tokenizer's own special tokens.

    Raises:
        RewardError: the tokenizer cannot be read.
    """
    tokenizer = _tokenizer(source)
    return lambda answer: list(tokenizer(answer.text)["input_ids"])


def chat_encoder(source: Path | str, records: PromptRecords) -> Encode:
    """The chat template's rendering of the conversation with the response as the assistant's last message.

    The conversation is `messages` of the prompt's record if it has one (required for prompts rendered in the actor's own
    template), otherwise the prompt as the user's only message. The template runs in transformers' sandbox.

    Raises:
        RewardError: the tokenizer cannot be read, or has no chat template.
    """
    tokenizer = _tokenizer(source)
    if not tokenizer.chat_template:
        raise RewardError(f"{source} has no chat template, so the reward cannot read: chat; read: text needs none")

    def encode(answer: Answer) -> list[int]:
        before = records.record(answer.prompt_ids).get(MESSAGES) or [{"role": "user", "content": answer.prompt}]
        conversation = [*before, {"role": "assistant", "content": answer.response}]
        try:
            return list(tokenizer.apply_chat_template(conversation, tokenize=True)["input_ids"])
        except Exception as error:
            raise RewardError(
                f"the chat template of {source} refuses sequence {answer.sequence_id}: {type(error).__name__}: {error}"
            ) from error

    return encode


def _tokenizer(source: Path | str) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import

    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RewardError(f"the reward model's tokenizer in {source} cannot be read: {error}") from None
