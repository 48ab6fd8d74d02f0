"""Sealing: short texts that lie encrypted and authenticated in the database, under keys that do not lie there.

The construction is encrypt-then-MAC from one primitive, HMAC, which the standard library has; no cipher is there, and the project
has no dependency that brings one. For each text a nonce is drawn, and from key and nonce come two fresh keys:

    encryption, authentication = HMAC-SHA512(key, "oppo.sealed.1" ‖ nonce)
    body = text ⊕ HMAC-SHA256(encryption, 0) ‖ HMAC-SHA256(encryption, 1) ‖ …
    sealed = 1 ‖ key's fingerprint ‖ nonce ‖ body ‖ HMAC-SHA256(authentication, length of context ‖ context ‖ body)

The context names the row (team and secret), so that a sealed value copied into another row does not open.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

VERSION = b"\x01"
KEY_BYTES, FINGERPRINT_BYTES, NONCE_BYTES, TAG_BYTES = 32, 4, 32, 32
KEYS_KEPT = 2  # the newest, and the one before it, under which something may be sealed while keys are changed


class Unsealable(Exception):
    """It was sealed under a key that is not there any more, for another place, or was altered."""


def seal(text: str, context: str) -> bytes:
    """Seal a text for a place, under the newest key."""
    return _seal(text, context, keyring()[0])


def unseal(sealed: bytes, context: str) -> str:
    """The text again. Raises `Unsealable`."""
    start, end = len(VERSION) + FINGERPRINT_BYTES, -TAG_BYTES
    nonce, body, tag = sealed[start : start + NONCE_BYTES], sealed[start + NONCE_BYTES : end], sealed[end:]
    key = next((key for key in keyring() if sealed.startswith(VERSION + _fingerprint(key))), None)
    if key is None:
        raise Unsealable("the key that it was sealed with is gone")
    encryption, authentication = _fresh_keys(key, nonce)
    if not hmac.compare_digest(tag, _tag(authentication, context, body)):
        raise Unsealable("it was altered, or belongs elsewhere")
    return _crossed(body, encryption).decode()


def _seal(text: str, context: str, key: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    encryption, authentication = _fresh_keys(key, nonce)
    body = _crossed(text.encode(), encryption)
    return VERSION + _fingerprint(key) + nonce + body + _tag(authentication, context, body)


def _fresh_keys(key: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    both = hmac.digest(key, b"oppo.sealed.1" + nonce, "sha512")
    return both[:32], both[32:]


def _crossed(text: bytes, key: bytes) -> bytes:
    blocks = (hmac.digest(key, number.to_bytes(8, "big"), "sha256") for number in range(-(-len(text) // 32)))
    return bytes(a ^ b for a, b in zip(text, b"".join(blocks), strict=False))


def _tag(key: bytes, context: str, body: bytes) -> bytes:
    place = context.encode()
    return hmac.digest(key, len(place).to_bytes(8, "big") + place + body, "sha256")


def _fingerprint(key: bytes) -> bytes:
    return hashlib.sha256(b"oppo.sealed.key\0" + key).digest()[:FINGERPRINT_BYTES]


def keyring() -> list[bytes]:
    """The keys, newest first: from OPPO_SECRETS_KEYS, else from the file, which is made with one key when missing.

    The file is read each time, so that every process knows a new key at once.

    Raises:
        ImproperlyConfigured: a key is not 32 bytes in base64.
    """
    if settings.OPPO_SECRETS_KEYS:
        return [_parsed(text) for text in settings.OPPO_SECRETS_KEYS]
    file = _key_file()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return [_parsed(text) for text in file.read_text().split()]
    with os.fdopen(descriptor, "w") as out:
        key = _new_key()
        out.write(key + "\n")
    return [_parsed(key)]


def add_key() -> None:
    """Put a new key before those in the file; the oldest ones go.

    Raises:
        ImproperlyConfigured: the environment gives the keys.
    """
    if settings.OPPO_SECRETS_KEYS:
        raise ImproperlyConfigured("OPPO_SECRETS_KEYS holds the keys: put a new one first there, and the old one behind it.")
    keyring()
    file = _key_file()
    kept = [_new_key(), *file.read_text().split()][:KEYS_KEPT]
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write("\n".join(kept) + "\n")
    fresh.replace(file)


def _key_file() -> Path:
    return Path(settings.OPPO_HOME) / "secrets_keys"


def _new_key() -> str:
    return base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode()


def _parsed(text: str) -> bytes:
    try:
        key = base64.urlsafe_b64decode(text)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ImproperlyConfigured(f"A key of team secrets is not {KEY_BYTES} bytes in URL-safe base64.")
    return key
