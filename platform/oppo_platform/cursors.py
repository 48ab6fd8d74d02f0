"""Cursors of listings: the sort key of the last row, as a URL-safe string."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any


class BadCursor(ValueError):
    """The string is no cursor of this listing."""


def write_cursor(*place: Any) -> str:
    """The position, JSON-ready values, as a string."""
    return base64.urlsafe_b64encode(json.dumps(place).encode()).decode().rstrip("=")


def read_cursor(cursor: str, *kinds: type | tuple[type, ...]) -> list[Any]:
    """The position. Raises `BadCursor` unless it has one value of each of these types; booleans are no numbers."""
    try:
        place = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise BadCursor from error
    if not isinstance(place, list) or len(place) != len(kinds):
        raise BadCursor
    for value, kind in zip(place, kinds, strict=True):
        too_large = isinstance(value, int) and abs(value) >= 2**63
        if not isinstance(value, kind) or isinstance(value, bool) or too_large:
            raise BadCursor
    return place
