"""Spec section `secrets`: references to team secrets by name; a spec never contains a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from oppo_contract.fields import ALLOWED
from oppo_contract.spec_errors import SettingError

PREFIX = "secret:"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
NAME_WORDS = "1 to 64 letters, digits and _ . -, the first a letter"
# Allow-list: variables such as LD_PRELOAD or OPPO_REWARD_HOSTS control what runs on a node and which hosts it may contact.
VARIABLE = re.compile(r"(?!OPPO_(?!REWARD_))[A-Z][A-Z0-9_]{0,110}_(KEY|TOKEN|SECRET|PASSWORD)")
VARIABLE_WORDS = "capital letters, digits and _, ending in _KEY, _TOKEN, _SECRET or _PASSWORD; of OPPO_ ones only OPPO_REWARD_"

SecretRefs = Annotated[
    dict[str, str],
    Field(max_length=20, json_schema_extra={ALLOWED: "a mapping of environment variables to secret:NAME"}),
]


def check_references(references: Mapping[str, str]) -> None:
    """Raise SettingError for a variable that is not allowed, or a value that is not `secret:NAME`."""
    for variable, reference in references.items():
        if not VARIABLE.fullmatch(variable):
            raise SettingError("secrets", "is a variable name that secrets cannot use", value=variable, allowed=VARIABLE_WORDS)
        if not reference.startswith(PREFIX) or not NAME.fullmatch(reference.removeprefix(PREFIX)):
            # The value may be the secret itself: do not show it.
            raise SettingError(
                f"secrets.{variable}",
                "is not a secret reference; specs must not contain secret values",
                value="…",
                allowed=f"{PREFIX}NAME, with {NAME_WORDS}",
            )


def secret_names(references: Mapping[str, str]) -> dict[str, str]:
    """Variable → name of the secret, for valid references."""
    return {variable: reference.removeprefix(PREFIX) for variable, reference in references.items()}
