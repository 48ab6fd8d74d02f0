"""Turns of the prompts that are conversations, so that samples and rewards have them apart."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from pathlib import Path

import numpy as np

from oppo_contract.sections.run import PromptSource
from oppo_contract.spec import RunSpec
from oppo_core.rollout.chat import Message, is_conversation
from oppo_core.rollout.prompt_files import iter_records
from oppo_core.rollout.prompts import prompt_files
from oppo_core.rollout.tokenizer import TextCodec


class Conversations:
    """Messages of prompts by the prompt's tokens; prompts of text or token ids have none."""

    def __init__(self) -> None:
        self._messages: dict[bytes, list[Message]] = {}

    def read(self, data: PromptSource, roots: list[Path], codec: TextCodec) -> None:
        """Add prompts that `read_prompts` accepts; only conversations are tokenized."""
        for record, _ in iter_records(prompt_files(data, roots), data.columns):
            messages = record[data.prompt_field]
            if is_conversation(messages):
                turns = [{"role": message["role"], "content": message["content"]} for message in messages]
                self._messages.setdefault(_key(codec.chat(messages)), turns)

    def messages(self, prompt_ids: Rows[int]) -> list[Message] | None:
        """The turns of a prompt, each with `role` and `content` only; None unless it is a conversation."""
        return self._messages.get(_key(prompt_ids)) if self._messages else None


def read_conversations(spec: RunSpec, roots: list[Path], codec: TextCodec) -> Conversations:
    """Conversations of the run's prompts, held-out ones included."""
    conversations = Conversations()
    for data in (spec.data, spec.evaluation):
        if data is not None:
            conversations.read(data, roots, codec)
    return conversations


def prompt_text(prompt_ids: list[int], messages: list[Message] | None, codec: TextCodec) -> str:
    """A prompt as one text: of a conversation the last user turn (without one, the last turn), otherwise the decoded tokens."""
    if not messages:
        return codec.decode(prompt_ids)
    turns = [message for message in messages if message["role"] == "user"] or messages
    return str(turns[-1]["content"])


def _key(prompt_ids: Rows[int]) -> bytes:
    return np.asarray(prompt_ids, dtype=np.int64).tobytes()
