"""Base class and field types of spec sections."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo

from oppo_contract.fields import ALLOWED
from oppo_contract.spec_errors import SettingError

NAME_WORDS = "1 to 120 characters on one line, without a space at the begin or end"
# Control characters, invisible ones, and those that change the direction of the text after them. Joiners are parts of emoji.
HIDDEN = r"\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
JOINERS = r"\u200c\u200d\ufe0e\ufe0f"
NAME_PATTERN = rf"^[^\s{HIDDEN}{JOINERS}]([^{HIDDEN}]*[^\s{HIDDEN}])?$"
Name = Annotated[str, Field(min_length=1, max_length=120, pattern=NAME_PATTERN, json_schema_extra={ALLOWED: NAME_WORDS})]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


STORED = {"stored": True}


def is_stored(info: ValidationInfo) -> bool:
    """Whether the spec of a stored run or checkpoint is validated: it may have values that a new run may not."""
    return info.context == STORED


class Section(BaseModel):
    """A section of the spec: unknown keys are errors, values are not coerced, instances are immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def reject_unused(self, name: str, why: str, remedy: str = "") -> None:
        """Raise SettingError if field `name` is not its default, for a setting without effect.

        Args:
            why: the reason, completes "has no effect …".
            remedy: a change of other settings that gives it an effect.
        """
        value, default = getattr(self, name), type(self).model_fields[name].default
        if value != default:
            allowed = f"{json.dumps(default)} (the default)"
            raise SettingError(
                name, f"has no effect {why}", value=value, allowed=f"{allowed}, or {remedy}" if remedy else allowed
            )
