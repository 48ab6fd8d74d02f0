"""What somebody typed into a search field."""

from __future__ import annotations

import re

MOST_PIECES = 10
_PIECE = re.compile(r'"([^"]+)"|(\S+)')


def pieces(words: str) -> list[str]:
    """What to search for: words, and phrases in double quotes; at most ten, without the NUL that PostgreSQL cannot hold."""
    clean = words.replace("\0", "\ufffd")
    return [phrase or word for phrase, word in _PIECE.findall(clean)][:MOST_PIECES]
