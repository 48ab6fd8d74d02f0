"""Conversations as prompts: a model folder's own chat template says how one is written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Message = dict[str, Any]


class ChatError(ValueError):
    """A conversation that cannot be written down, with the reason and the remedy."""


def is_conversation(value: object) -> bool:
    """Whether a prompt's value is meant as messages and not as token ids."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def checked(messages: list[Message]) -> list[Message]:
    """The messages as they are. Raises ChatError when one lacks `role` or `content`, or has something else than text there."""
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                said = f"has {type(message[key]).__name__} there" if key in message else f"has {', '.join(message) or 'nothing'}"
                raise ChatError(f"message {number} needs a text under {key!r}; it {said}")
    return messages


class ChatTemplate:
    """The chat template of a folder, rendered by transformers in its sandbox. Loaded when the first conversation comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def render(self, messages: list[Message]) -> str:
        """The conversation as text, special tokens written out, up to where the assistant's answer begins.

        Raises:
            ChatError: the folder has no template, a message is incomplete, or the template refuses the conversation.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        try:
            return str(self._tokenizer.apply_chat_template(checked(messages), tokenize=False, add_generation_prompt=True))
        except ChatError:
            raise
        except Exception as error:  # noqa: BLE001 - a template is a program, and may fail in any way
            raise ChatError(f"the actor's chat template refuses it: {type(error).__name__}: {error}") from None

    def _load(self) -> Any:
        from transformers import PreTrainedTokenizerFast  # takes seconds to import

        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(self._folder))
        if not tokenizer.chat_template:
            raise ChatError(
                f"the actor's tokenizer in {self._folder.name} has no chat template (chat_template.jinja, or chat_template in"
                " tokenizer_config.json); add one, or give the prompts as text"
            )
        return tokenizer
