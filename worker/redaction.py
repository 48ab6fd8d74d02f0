"""Keeps secrets out of what leaves the node: their values are struck from every line and event before it is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping

SHORTEST = 8  # lines of a value that are shorter would strike ordinary words as well


class Redactor:
    """Replaces the values of an attempt's secrets by their variables' names, wherever they stand."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        parts = {part: variable for variable, value in secrets.items() for part in _parts(value)}
        # The longest first, so that a value that contains another one leaves nothing behind.
        self._texts = [(part, f"[{parts[part]}]") for part in sorted(parts, key=len, reverse=True)]
        self._escaped = [(form.encode(), name.encode()) for part, name in self._texts for form in _escaped(part)]

    def text(self, text: str) -> str:
        """A line of a log, without secrets."""
        for part, name in self._texts:
            text = text.replace(part, name)
        return text

    def lines(self, lines: list[str]) -> list[str]:
        """Several of them."""
        return [self.text(line) for line in lines] if self._texts else lines

    def event(self, line: bytes) -> bytes:
        """A line of JSON, without secrets; still JSON, because values are replaced as they are written there."""
        for form, name in self._escaped:
            line = line.replace(form, name)
        return line


def _parts(value: str) -> set[str]:
    """The value, and each of its lines, because a log shows lines one by one."""
    return {part for part in (value, *value.splitlines()) if len(part) >= SHORTEST}


def _escaped(part: str) -> set[str]:
    """How JSON may write it."""
    return {json.dumps(part, ensure_ascii=plain)[1:-1] for plain in (True, False)}
