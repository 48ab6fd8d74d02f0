"""Records of the prompts files by prompt, for rewards that need more than the prompt's text, for example a right answer.

Scorers identify a sequence by its tokens, so records are found by them, for training and held-out prompts alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oppo_core.rewards.errors import RewardError
from oppo_core.rollout.chat import is_conversation
from oppo_core.rollout.prompt_files import iter_records
from oppo_core.rollout.prompts import Files, read_prompts
from oppo_core.rollout.tokenizer import TextCodec

MESSAGES = "messages"
Record = Mapping[str, Any]


class PromptRecords:
    """All records of some prompts files, by the prompt's tokens; only `keys` of each, if given."""

    def __init__(self, keys: tuple[str, ...] | None = None) -> None:
        self._keys = keys
        self._records: dict[bytes, Record] = {}
        self._where: dict[bytes, str] = {}

    def read(
        self, files: Files, prompt_field: str, codec: TextCodec, longest: int, columns: Mapping[str, str] | None = None
    ) -> None:
        """Add files. Their records must have been accepted as prompts (`read_prompts`).

        Raises:
            PromptError: as `read_prompts`.
            RewardError: two lines have the same prompt and differ otherwise, so that the record would be ambiguous.
        """
        prompts = read_prompts(files, prompt_field, codec, longest, columns=columns)
        records = iter_records([files] if isinstance(files, Path) else files, columns)
        for ids, (fields, where) in zip(prompts, records, strict=True):
            key = ids.tobytes()
            row = _with_messages(fields, prompt_field)
            record = row if self._keys is None else {name: row[name] for name in self._keys if name in row}
            if binary := [name for name, value in record.items() if _has_bytes(value)]:
                raise RewardError(
                    f"{where}: column {binary[0]!r} is binary, which a reward cannot read; leave it out of the file"
                )
            if self._records.setdefault(key, record) != record:
                raise RewardError(
                    f"{where} has the same prompt as {self._where[key]}, but differs otherwise; the reward reads more of a"
                    " line than its prompt, so each prompt may be in one line only"
                )
            self._where.setdefault(key, where)

    def record(self, prompt_ids: list[int]) -> Record:
        """The record of a prompt: its JSON object."""
        return self._records[np.asarray(prompt_ids, dtype=np.int64).tobytes()]


def _has_bytes(value: Any) -> bool:
    """Whether a value is binary or contains something binary, such as an image of a Hugging Face dataset."""
    if isinstance(value, dict):
        return any(map(_has_bytes, value.values()))
    return any(map(_has_bytes, value)) if isinstance(value, list) else isinstance(value, bytes)


def _with_messages(record: dict[str, Any], prompt_field: str) -> dict[str, Any]:
    """The record; a prompt that is a conversation becomes its `messages`, unless it has that field."""
    return {MESSAGES: record[prompt_field]} | record if is_conversation(record[prompt_field]) else record
