"""Bearer tokens: `oppo<kind>_<prefix>_<secret>`. Only the prefix and an HMAC of the secret are stored.

The prefix finds the row, the HMAC verifies the secret. The pepper is derived from SECRET_KEY, so a copy of the database does not
suffice to log in.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal

from django.conf import settings

Kind = Literal["api", "join", "node", "attempt", "login", "invite", "password"]
PREFIX_LENGTH = 12


@dataclass(frozen=True, slots=True)
class NewToken:
    """A created token; `text` is shown once and not stored."""

    text: str
    prefix: str
    digest: str


def new_token(kind: Kind) -> NewToken:
    """A new token with 256 random bits."""
    prefix = secrets.token_hex(PREFIX_LENGTH // 2)
    secret = secrets.token_hex(32)
    return NewToken(f"oppo{kind}_{prefix}_{secret}", prefix, digest_of(secret))


def digest_of(secret: str) -> str:
    """HMAC-SHA256 of a secret, as 64 hexadecimal digits."""
    pepper = hashlib.sha256(b"oppo.tokens\0" + settings.SECRET_KEY.encode()).digest()
    return hmac.new(pepper, secret.encode(), hashlib.sha256).hexdigest()


def parse_token(text: str, kind: Kind) -> tuple[str, str] | None:
    """(prefix, digest) of a received token; None if it is not of this kind."""
    parts = text.split("_")
    if len(parts) != 3 or parts[0] != f"oppo{kind}" or len(parts[1]) != PREFIX_LENGTH or not text.isascii():
        return None
    if not parts[1].isalnum():  # isascii() accepts NUL, which PostgreSQL rejects
        return None
    return parts[1], digest_of(parts[2])


def same_digest(first: str, second: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(first, second)
