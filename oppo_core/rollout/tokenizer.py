"""Tokenizers: a model folder's tokenizer.json, or a byte tokenizer for built-in architectures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from oppo_contract.model_folder import ModelFolderError, find_model, read_config, tokenizer_digest
from oppo_contract.sections.models import hub_advice
from oppo_contract.spec import ModelSpec
from oppo_core.rollout.chat import ChatError, ChatTemplate, Message

PAD, BOS, EOS = 0, 1, 2


class UnknownWordError(ValueError):
    """The tokenizer cannot encode a text, for example because it has no unknown token."""


class TextCodec(Protocol):
    """Interface between the engine and a tokenizer."""

    vocab: int
    eos: int
    pad: int
    digest: str
    extra_eos: tuple[int, ...]  # further end-of-sequence tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def decode(self, ids: list[int]) -> str:
        """Text of token ids without special tokens."""

    def chat(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation, ending with the generation prompt. Raises ChatError."""


class ByteCodec:
    """UTF-8 bytes after three special tokens, for built-in architectures; vocabularies below 259 wrap around."""

    extra_eos: tuple[int, ...] = ()

    def __init__(self, vocab: int) -> None:
        self.vocab, self.eos, self.pad = vocab, EOS, PAD
        self.digest = f"bytes-{vocab}"

    def encode(self, text: str) -> list[int]:
        """Beginning-of-sequence, then one token per byte."""
        return [BOS] + [3 + byte % (self.vocab - 3) for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens; invalid bytes and control characters are replaced."""
        text = bytes((i - 3) % 256 for i in ids if i >= 3).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)

    def chat(self, messages: list[Message]) -> list[int]:
        """Raises ChatError: there is no chat template."""
        raise ChatError(
            "the actor is a built-in architecture that reads bytes and has no chat template; give the prompts as text"
        )


class FileCodec:
    """A `tokenizers` file. `eos` is the first end-of-sequence id in config.json.

    Chat models often list several ids, there or in generation_config.json, such as an end-of-turn token. Each ends an answer.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelFolderError(f"{folder} has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        # A trainer's last batch leaves both in the file; a prompt would be cut or padded without a word.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab = int(self._tokenizer.get_vocab_size())
        self.digest = tokenizer_digest(path)
        self._template = ChatTemplate(folder)
        self.eos = _token_id(folder, "eos_token_id")
        self.extra_eos = tuple(sorted({i for i in _eos_ids(folder) if i < self.vocab} - {self.eos}))
        self.pad = _token_id(folder, "pad_token_id", default=self.eos)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the tokenizer's own special tokens. Raises UnknownWordError for text that it cannot encode."""
        try:
            return list(self._tokenizer.encode(text).ids)
        except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
            raise UnknownWordError(str(error)) from None

    def decode(self, ids: list[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def chat(self, messages: list[Message]) -> list[int]:
        """Token ids of the rendered conversation; the chat template includes all special tokens."""
        try:
            return list(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids)
        except ChatError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
            raise UnknownWordError(str(error)) from None


def load_codec(model: ModelSpec, roots: list[Path]) -> TextCodec:
    """The tokenizer of a model. Raises ModelFolderError when the folder has none."""
    if model.tiny is not None:
        return ByteCodec(model.tiny.vocab)
    assert model.path is not None
    try:
        folder = find_model(model.path, roots)
    except ModelFolderError as error:
        raise ModelFolderError(f"{error}{hub_advice(model.path)}") from None
    return FileCodec(folder)


def _eos_ids(folder: Path) -> Iterator[int]:
    """All end-of-sequence ids in a model's config files."""
    path = folder / "generation_config.json"
    for config in (read_config(folder), json.loads(path.read_text()) if path.exists() else {}):
        ids = config.get("eos_token_id")
        yield from (i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))


def _token_id(folder: Path, key: str, default: int | None = None) -> int:
    value = read_config(folder).get(key)
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, int):
        return value
    if default is None:
        raise ModelFolderError(f"{folder / 'config.json'} names no {key}; without it an answer cannot end")
    return default
