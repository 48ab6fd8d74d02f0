"""The prompts, in an order that is a function of the seed and the epoch, and a cursor that survives a restart."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oppo_core.randomness import Use, generator
from oppo_core.rollout.tokens import TextCodec, UnknownWordError


class PromptError(ValueError):
    """A prompts file that cannot be used, with file and line."""


def read_prompts(path: Path, key: str, codec: TextCodec, longest: int) -> list[NDArray[np.int64]]:
    """The prompts of a JSON Lines file as token ids; a value is text or a list of token ids.

    Raises:
        PromptError: broken JSON, a missing key, an empty or too long prompt, a token outside the vocabulary, no prompt.
    """
    prompts: list[NDArray[np.int64]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                prompts.append(_prompt(line, key, codec, longest, f"{path.name}, line {number}"))
    if not prompts:
        raise PromptError(f"{path.name} holds no prompt")
    return prompts


def _prompt(line: str, key: str, codec: TextCodec, longest: int, where: str) -> NDArray[np.int64]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or key not in row:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise PromptError(f"{where}: has no {key!r} (data.prompt_field); it has {keys}")
    value = row[key]
    try:
        ids = codec.encode(value) if isinstance(value, str) else value
    except UnknownWordError as error:
        raise PromptError(f"{where}: the actor's tokenizer cannot read {value!r}: {error}") from None
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < codec.vocab for i in ids):
        raise PromptError(f"{where}: {key!r} must be text, or a list of token ids from 0 to {codec.vocab - 1}, and not empty")
    if len(ids) > longest:
        raise PromptError(f"{where}: the prompt has {len(ids)} tokens, rollout.max_prompt_tokens is {longest}")
    return np.asarray(ids, dtype=np.int64)


class PromptStream:
    """Endless prompts: each epoch visits every prompt once, in an order drawn from (seed, epoch)."""

    def __init__(self, prompts: list[NDArray[np.int64]], seed: int, shuffle: bool) -> None:
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.drawn = 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def draw(self) -> int:
        """Index of the next prompt; advances the cursor `drawn`."""
        epoch, offset = divmod(self.drawn, len(self.prompts))
        self.drawn += 1
        return int(self._epoch(epoch)[offset])

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            order = np.arange(len(self.prompts))
            if self.shuffle:
                generator(self.seed, Use.SHUFFLING, epoch).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
