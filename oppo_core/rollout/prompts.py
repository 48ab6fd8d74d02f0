"""The prompt dataset, and its shuffled order as a function of (seed, epoch)."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oppo_contract.model_folder import check_links, find
from oppo_contract.prompt_files import PromptFilesError, expand
from oppo_contract.sections.run import PromptSource
from oppo_core.rng import Use, generator
from oppo_core.rollout.chat import ChatError, is_conversation
from oppo_core.rollout.prompt_files import PromptError, iter_records
from oppo_core.rollout.tokenizer import TextCodec, UnknownWordError

__all__ = ["PromptError", "PromptStream", "digest", "iter_rows", "prompt_files", "read_prompts"]
Files = Path | Rows[Path]


def read_prompts(
    files: Files, key: str, codec: TextCodec, longest: int, setting: str = "data.prompt_field",
    columns: Mapping[str, str] | None = None,
) -> list[NDArray[np.int64]]:  # fmt: skip
    """Read prompts files as token ids. A value is text, a list of {role, content} messages, or a list of token ids.

    `setting` is the spec setting that names `key`, for error messages; `columns` as in `iter_records`.

    Raises:
        PromptError: invalid JSON, a missing key, an empty or too long prompt, a token outside the vocabulary, messages without
            role or content or without a chat template; no prompt at all.
    """
    prompts: list[NDArray[np.int64]] = []
    for ids, where in iter_rows(files, key, setting, codec, columns):
        if len(ids) > longest:
            raise PromptError(f"{where}: the prompt has {len(ids)} tokens, rollout.max_prompt_tokens is {longest}")
        prompts.append(ids)
    return prompts


def iter_rows(
    files: Files, key: str, setting: str, codec: TextCodec, columns: Mapping[str, str] | None = None
) -> Iterator[tuple[NDArray[np.int64], str]]:
    """Yield each record's token ids, and its file and line for error messages. Arguments as of `read_prompts`.

    Raises:
        PromptError: see `iter_records`; or a missing key, an empty value, a token outside the vocabulary.
    """
    for record, where in iter_records(_listed(files), columns, setting.rpartition(".")[0]):
        yield _row(record, key, setting, codec, where), where


def _listed(files: Files) -> Rows[Path]:
    return [files] if isinstance(files, Path) else files


def prompt_files(data: PromptSource, roots: list[Path]) -> list[Path]:
    """The files of the spec's prompts, in order. Raises ModelFolderError for a missing one, PromptError as `expand`."""
    try:
        files = expand([find(path, roots) for path in data.paths])
    except PromptFilesError as error:
        raise PromptError(str(error)) from None
    check_links(files, roots)
    return files


def _row(row: Any, key: str, setting: str, codec: TextCodec, where: str) -> NDArray[np.int64]:
    if not isinstance(row, dict) or key not in row:
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise PromptError(f"{where}: has no {key!r} ({setting}); it has {keys}")
    ids = _ids(row[key], codec, where)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < codec.vocab for i in ids):
        raise PromptError(
            f"{where}: {key!r} must be text, a list of messages with role and content, or a list of token ids from 0 to"
            f" {codec.vocab - 1}, and not empty"
        )
    return np.asarray(ids, dtype=np.int64)


def _ids(value: Any, codec: TextCodec, where: str) -> Any:
    """Token ids of a text or a conversation; other values unchanged."""
    try:
        if is_conversation(value):
            return codec.chat(value)
        return codec.encode(value) if isinstance(value, str) else value
    except UnknownWordError as error:
        raise PromptError(f"{where}: the actor's tokenizer cannot read {textwrap.shorten(str(value), 200)!r}: {error}") from None
    except ChatError as error:
        raise PromptError(f"{where}: {error}") from None


def digest(prompts: list[NDArray[np.int64]]) -> str:
    """SHA-256 of the tokenized prompts in file order."""
    sha = hashlib.sha256()
    for ids in prompts:
        sha.update(np.asarray(len(ids), dtype="<i8").tobytes() + ids.astype("<i8").tobytes())
    return sha.hexdigest()


class PromptStream:
    """Endless stream of prompts: each epoch visits every prompt once, in an order drawn from (seed, epoch)."""

    def __init__(self, prompts: list[NDArray[np.int64]], seed: int, shuffle: bool) -> None:
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.digest = digest(prompts)
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    def draw(self, number: int) -> int:
        """Index of the run's `number`-th prompt, from 0."""
        epoch, offset = divmod(number, len(self.prompts))
        return int(self._epoch(epoch)[offset])

    def _epoch(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            order = np.arange(len(self.prompts))
            if self.shuffle:
                generator(self.seed, Use.SHUFFLING, epoch).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
