"""Parses the text of a search field."""

from __future__ import annotations

import re

MAX_SEARCH_TERMS = 10
_PIECE = re.compile(r'"([^"]+)"|(\S+)')


def search_terms(words: str) -> list[str]:
    """Search terms: words, and phrases in double quotes; at most ten, without NUL, which PostgreSQL cannot store."""
    clean = words.replace("\0", "\ufffd")
    return [phrase or word for phrase, word in _PIECE.findall(clean)][:MAX_SEARCH_TERMS]
