"""Text to tokens and back: a folder's tokenizer.json, or bytes for a built-in architecture without one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from oppo_contract.sections.models import hub_advice
from oppo_contract.spec import ModelSpec
from oppo_core.models.errors import ModelFolderError
from oppo_core.models.model_io import find, read_config
from oppo_core.rollout.chat import ChatError, ChatTemplate, Message

PAD, BOS, EOS = 0, 1, 2


class UnknownWordError(ValueError):
    """Text that a tokenizer without an unknown-word token cannot read."""


class TextCodec(Protocol):
    """What the engine asks of a tokenizer."""

    vocab: int
    eos: int
    pad: int
    digest: str
    also_end: tuple[int, ...]  # further tokens with which an answer ends by itself

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def decode(self, ids: list[int]) -> str:
        """Readable text of token ids, special tokens left out."""

    def chat(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Raises ChatError."""


class ByteCodec:
    """UTF-8 bytes behind three special tokens, for a built-in architecture; vocabularies below 259 wrap around."""

    also_end: tuple[int, ...] = ()

    def __init__(self, vocab: int) -> None:
        self.vocab, self.eos, self.pad = vocab, EOS, PAD
        self.digest = f"bytes-{vocab}"

    def encode(self, text: str) -> list[int]:
        """Beginning-of-sequence, then one token a byte."""
        return [BOS] + [3 + byte % (self.vocab - 3) for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        """Bytes as text, what is undecodable or a control character replaced; special tokens left out."""
        text = bytes((i - 3) % 256 for i in ids if i >= 3).decode(errors="replace")
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)

    def chat(self, messages: list[Message]) -> list[int]:
        """Raises ChatError: bytes have no roles."""
        raise ChatError(
            "the actor is a built-in architecture that reads bytes and has no chat template; give the prompts as text"
        )


class FileCodec:
    """A `tokenizers` file. The end-of-sequence id is the first that config.json names.

    Chat models often name several, there or in generation_config.json, and a later one is the end of a turn: all end an answer.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.exists():
            raise ModelFolderError(f"{folder} has no tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.vocab = int(self._tokenizer.get_vocab_size())
        self.digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._template = ChatTemplate(folder)
        self.eos = _token_id(folder, "eos_token_id")
        self.also_end = tuple(sorted({i for i in _ends(folder) if i < self.vocab} - {self.eos}))
        self.pad = _token_id(folder, "pad_token_id", default=self.eos)

    def encode(self, text: str) -> list[int]:
        """Token ids, with what the tokenizer's own template adds. Raises UnknownWordError for text it has no token for."""
        try:
            return list(self._tokenizer.encode(text).ids)
        except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
            raise UnknownWordError(str(error)) from None

    def decode(self, ids: list[int]) -> str:
        """Text, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def chat(self, messages: list[Message]) -> list[int]:
        """Token ids of the rendered conversation, to which nothing is added: the template writes out what it wants."""
        try:
            return list(self._tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids)
        except ChatError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises nothing more exact
            raise UnknownWordError(str(error)) from None


def codec_of(model: ModelSpec, roots: list[Path]) -> TextCodec:
    """The tokenizer that belongs to a model. Raises ModelFolderError when it has none here."""
    if model.tiny is not None:
        return ByteCodec(model.tiny.vocab)
    assert model.path is not None
    try:
        folder = find(model.path, roots)
    except ModelFolderError as error:
        raise ModelFolderError(f"{error}{hub_advice(model.path)}") from None
    return FileCodec(folder)


def _ends(folder: Path) -> Iterator[int]:
    """All end-of-sequence ids that a model's files name."""
    path = folder / "generation_config.json"
    for config in (read_config(folder), json.loads(path.read_text()) if path.exists() else {}):
        named = config.get("eos_token_id")
        yield from (i for i in (named if isinstance(named, list) else [named]) if isinstance(i, int))


def _token_id(folder: Path, key: str, default: int | None = None) -> int:
    value = read_config(folder).get(key)
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, int):
        return value
    if default is None:
        raise ModelFolderError(f"{folder / 'config.json'} names no {key}; without it an answer cannot end")
    return default
