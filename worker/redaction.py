"""Replaces secret values in log lines and events before they are uploaded."""

from __future__ import annotations

import json
from collections.abc import Mapping

MIN_LENGTH = 8  # shorter lines of a value would match ordinary words


class Redactor:
    """Replaces the values of an attempt's secrets with their variables' names."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        # A log shows a multi-line value line by line, so each line is replaced too.
        pairs = [(part, variable) for variable, value in secrets.items() for part in (value, *value.splitlines())]
        parts = {part: variable for part, variable in pairs if len(part) >= MIN_LENGTH}
        # Longest first, because a value may contain another one.
        self._texts = [(part, f"[{parts[part]}]") for part in sorted(parts, key=len, reverse=True)]
        self._escaped = [(form.encode(), name.encode()) for part, name in self._texts for form in _json_forms(part)]

    def text(self, text: str) -> str:
        """Text without secrets."""
        for part, name in self._texts:
            text = text.replace(part, name)
        return text

    def event(self, line: bytes) -> bytes:
        """A line of JSON without secrets; stays valid JSON."""
        for form, name in self._escaped:
            line = line.replace(form, name)
        return line


def _json_forms(part: str) -> set[str]:
    return {json.dumps(part, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)}
