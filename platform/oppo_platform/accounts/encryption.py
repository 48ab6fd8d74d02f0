"""Authenticated encryption of short texts in the database, with keys stored elsewhere.

    sealed = 2 ‖ key's fingerprint ‖ nonce ‖ AES-256-GCM(key, nonce, text, context)

The context names the row (team and secret), so that a value copied into another row does not decrypt. Nonces are random, which is
safe for some billions of texts per key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from oppo_contract.machine import write_private

VERSION = b"\x02"
KEY_BYTES, FINGERPRINT_BYTES, NONCE_BYTES = 32, 4, 12
KEYS_KEPT = 2  # the newest, and the previous one during a key rotation


class DecryptionError(Exception):
    """The key is missing, or the value was moved or altered."""


def encrypt(text: str, context: str) -> bytes:
    """Encrypt a text for a context with the newest key."""
    key, nonce = keyring()[0], secrets.token_bytes(NONCE_BYTES)
    return VERSION + _fingerprint(key) + nonce + AESGCM(key).encrypt(nonce, text.encode(), context.encode())


def decrypt(sealed: bytes, context: str) -> str:
    """The plain text. Raises `DecryptionError`."""
    key = next((key for key in keyring() if sealed.startswith(VERSION + _fingerprint(key))), None)
    if key is None:
        raise DecryptionError("its encryption key is missing")
    rest = sealed[len(VERSION) + FINGERPRINT_BYTES :]
    try:
        return AESGCM(key).decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], context.encode()).decode()
    except (InvalidTag, ValueError) as error:  # ValueError: it is truncated
        raise DecryptionError("it was altered, or belongs to another team or name") from error


def reencrypt(sealed: bytes, context: str) -> bytes | None:
    """The same text under the newest key; None if no key decrypts it."""
    try:
        return encrypt(decrypt(sealed, context), context)
    except DecryptionError:
        return None


def has_key(sealed: bytes) -> bool:
    """Whether the keyring has the key of an encrypted text, without decrypting it."""
    return any(sealed.startswith(VERSION + _fingerprint(key)) for key in keyring())


def _fingerprint(key: bytes) -> bytes:
    return hashlib.sha256(b"oppo.sealed.key\0" + key).digest()[:FINGERPRINT_BYTES]


def keyring() -> list[bytes]:
    """The keys, newest first: from OPPO_SECRETS_KEYS, otherwise from the file, which is created with one key if missing.

    The file is read each time, so that every process sees a new key at once.

    Raises:
        ImproperlyConfigured: a key is not 32 bytes in base64.
    """
    return [_parsed(text) for text in encoded_keys()]


def encoded_keys() -> list[str]:
    """The same keys in URL-safe base64: for `keyring`, and for a backup with keys."""
    if settings.OPPO_SECRETS_KEYS:
        return list(settings.OPPO_SECRETS_KEYS)
    file = _key_file()
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return file.read_text().split()
    with os.fdopen(descriptor, "w") as out:
        key = _new_key()
        out.write(key + "\n")
    return [key]


def add_key() -> None:
    """Put a new key before those in the file; surplus old ones are removed.

    Raises:
        ImproperlyConfigured: the environment has the keys.
    """
    if settings.OPPO_SECRETS_KEYS:
        raise ImproperlyConfigured("OPPO_SECRETS_KEYS holds the keys: put a new one first there, and the old one behind it.")
    keyring()
    file = _key_file()
    kept = [_new_key(), *file.read_text().split()][:KEYS_KEPT]
    write_private(file, "\n".join(kept) + "\n")


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
