"""Prompts as conversations, rendered with the model folder's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oppo_contract.events import MAX_CHAT_TURNS, MAX_ROLE

Message = dict[str, Any]


class ChatError(ValueError):
    """A conversation cannot be rendered; the message has the reason and the remedy."""


def is_conversation(value: object) -> bool:
    """Whether a prompt's value is a list of messages rather than token ids."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def validated_messages(messages: list[Message]) -> list[Message]:
    """Return the messages unchanged. Raises ChatError for a `role` or `content` that is no text or too long."""
    if len(messages) > MAX_CHAT_TURNS:
        raise ChatError(f"a conversation of {len(messages)} messages; at most {MAX_CHAT_TURNS} are allowed")
    for number, message in enumerate(messages, start=1):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                actual = (
                    f"has {type(message[key]).__name__} there" if key in message else f"has {', '.join(message) or 'nothing'}"
                )
                raise ChatError(f"message {number} needs a text under {key!r}; it {actual}")
        if not 1 <= len(message["role"]) <= MAX_ROLE:
            raise ChatError(f"message {number} has a role of {len(message['role'])} characters; 1 to {MAX_ROLE} are allowed")
    return messages


class ChatTemplate:
    """The chat template of a model folder, rendered by transformers in its sandbox. Loaded on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def render(self, messages: list[Message]) -> str:
        """The conversation as text with special tokens, ending with the assistant's generation prompt.

        Raises:
            ChatError: the folder has no template, a message is incomplete, or the template fails.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        try:
            text = self._tokenizer.apply_chat_template(validated_messages(messages), tokenize=False, add_generation_prompt=True)
            return str(text)
        except ChatError:
            raise
        except Exception as error:  # noqa: BLE001 - a template may raise anything
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
