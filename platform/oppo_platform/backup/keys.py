"""Keys outside the database: the secret key of token HMACs, and the encryption keys of team secrets.

Every backup has their fingerprints, so that a restore can compare them; the keys themselves are included on request.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings

from oppo_contract.machine import write_private
from oppo_platform.accounts import encryption
from oppo_platform.backup import BackupError

MEMBER = "keys.json"
SECRET_KEY, SECRETS_KEYS = "secret_key", "secrets_keys"  # files in OPPO_HOME
SHORTEST_IN_A_FILE = 50  # `environment.secret_key` rejects a shorter file as truncated
VARIABLES = {SECRET_KEY: "OPPO_SECRET_KEY", SECRETS_KEYS: "OPPO_SECRETS_KEYS"}


@dataclass(frozen=True, slots=True)
class Keys:
    """The secret key, and the keys of team secrets, newest first, in the format of their files."""

    secret_key: str
    secrets_keys: tuple[str, ...]

    def fingerprints(self) -> dict[str, str | list[str]]:
        """The fingerprint of each key."""
        return {SECRET_KEY: fingerprint(self.secret_key), SECRETS_KEYS: [fingerprint(key) for key in self.secrets_keys]}

    def as_json(self) -> bytes:
        """The content of the backup's member."""
        return json.dumps({SECRET_KEY: self.secret_key, SECRETS_KEYS: list(self.secrets_keys)}).encode()


def current_keys() -> Keys:
    """The keys of this installation."""
    return Keys(settings.SECRET_KEY, tuple(encryption.encoded_keys()))


def parse_keys(text: bytes) -> Keys:
    """Parse the keys in a backup. Raises BackupError for an invalid format."""
    try:
        data = json.loads(text)
        keys = Keys(str(data[SECRET_KEY]), tuple(map(str, data[SECRETS_KEYS])))
    except (ValueError, KeyError, TypeError) as error:
        raise BackupError("The keys in the backup are not in the form that this version knows.") from error
    if len(keys.secret_key) < 32 or not keys.secrets_keys:
        raise BackupError("The keys in the backup are not complete.")
    return keys


def fingerprint(key: str) -> str:
    """Eight hexadecimal digits of a hash of a key, for the manifest."""
    return hashlib.sha256(b"oppo.backup.key\0" + key.encode()).hexdigest()[:8]


def restore_keys(keys: Keys, home: Path, stamp: str) -> list[str]:
    """Write the keys to `home`; existing files with other keys are saved beside them. Returns a report in sentences.

    Current keys of team secrets are appended to the backup's, so that secrets encrypted with them stay readable.
    """
    done, here = [], encryption.encoded_keys()
    if keys.secret_key != settings.SECRET_KEY:
        given = os.environ.get("OPPO_SECRET_KEY", "").strip() or len(keys.secret_key) < SHORTEST_IN_A_FILE
        done.append(_put(home / SECRET_KEY, keys.secret_key, bool(given), stamp))
    if not set(keys.secrets_keys) <= set(here):
        both = dict.fromkeys([*keys.secrets_keys, *here])
        done.append(_put(home / SECRETS_KEYS, "\n".join(both) + "\n", bool(settings.OPPO_SECRETS_KEYS), stamp))
    return done or ["The keys here are the backup's."]


def _put(file: Path, text: str, by_variable: bool, stamp: str) -> str:
    if by_variable:
        return f"The backup's {file.name} differs: set {VARIABLES[file.name]} to the content of its member {MEMBER}."
    before = file.with_name(f"{file.name}.before-{stamp}")
    if file.exists():
        os.link(file, before)
    write_private(file, text)
    return f"{file.name} is put back" + (f"; what was here is now {before.name}." if before.exists() else ".")
