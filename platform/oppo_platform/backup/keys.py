"""The keys that do not lie in the database: what tokens are HMACed under, and what team secrets are sealed with.

Their fingerprints go into every backup, so that a restore can say whether the keys here are the ones; the keys when asked for.
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
SHORTEST_IN_A_FILE = 50  # `environment.secret_key` takes a shorter one for a file that was cut short
VARIABLES = {SECRET_KEY: "OPPO_SECRET_KEY", SECRETS_KEYS: "OPPO_SECRETS_KEYS"}


@dataclass(frozen=True, slots=True)
class Keys:
    """The secret key, and the keys of team secrets, newest first, as they stand in their files."""

    secret_key: str
    secrets_keys: tuple[str, ...]

    def fingerprints(self) -> dict[str, str | list[str]]:
        """Eight hexadecimal digits of a hash of each."""
        return {SECRET_KEY: fingerprint(self.secret_key), SECRETS_KEYS: [fingerprint(key) for key in self.secrets_keys]}

    def as_json(self) -> bytes:
        """The member of a backup."""
        return json.dumps({SECRET_KEY: self.secret_key, SECRETS_KEYS: list(self.secrets_keys)}).encode()


def keys_here() -> Keys:
    """The keys of this installation."""
    return Keys(settings.SECRET_KEY, tuple(encryption.written_keys()))


def keys_from(text: bytes) -> Keys:
    """Keys as a backup holds them. Raises BackupError when they are not in that form."""
    try:
        told = json.loads(text)
        keys = Keys(str(told[SECRET_KEY]), tuple(map(str, told[SECRETS_KEYS])))
    except (ValueError, KeyError, TypeError) as error:
        raise BackupError("The keys in the backup are not in the form that this version knows.") from error
    if len(keys.secret_key) < 32 or not keys.secrets_keys:
        raise BackupError("The keys in the backup are not complete.")
    return keys


def fingerprint(key: str) -> str:
    """What a manifest says of a key."""
    return hashlib.sha256(b"oppo.backup.key\0" + key.encode()).hexdigest()[:8]


def put_back(keys: Keys, home: Path, stamp: str) -> list[str]:
    """Write the keys to `home`; files with others are kept beside them. Returns what was done, in sentences.

    Keys of team secrets that are here already stay behind the backup's, so that nothing sealed with them is lost.
    """
    done, here = [], encryption.written_keys()
    if keys.secret_key != settings.SECRET_KEY:
        given = os.environ.get("OPPO_SECRET_KEY", "").strip() or len(keys.secret_key) < SHORTEST_IN_A_FILE
        done.append(_put(home / SECRET_KEY, keys.secret_key, bool(given), stamp))
    if not set(keys.secrets_keys) <= set(here):
        both = dict.fromkeys([*keys.secrets_keys, *here])
        done.append(_put(home / SECRETS_KEYS, "\n".join(both) + "\n", bool(settings.OPPO_SECRETS_KEYS), stamp))
    return done or ["The keys here are the backup's."]


def _put(file: Path, text: str, by_variable: bool, stamp: str) -> str:
    if by_variable:
        return f"The backup's {file.name} differs: set {VARIABLES[file.name]} to what stands in its member {MEMBER}."
    before = file.with_name(f"{file.name}.before-{stamp}")
    if file.exists():
        os.link(file, before)
    write_private(file, text)
    return f"{file.name} is put back" + (f"; what was here is now {before.name}." if before.exists() else ".")
