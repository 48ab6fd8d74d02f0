"""What every section of the spec is made of."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from oppo_contract.fields import ALLOWED
from oppo_contract.spec_errors import SettingError

NAME_WORDS = "1 to 120 letters, digits, spaces and . _ -, the first a letter or digit"
Name = Annotated[
    str,
    Field(min_length=1, max_length=120, pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]*$", json_schema_extra={ALLOWED: NAME_WORDS}),
]
Path = Annotated[str, Field(min_length=1, max_length=1024)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the spec. Unknown keys are errors, values are never coerced, an instance never changes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def reject_unused(self, name: str, why: str, remedy: str = "") -> None:
        """Refuse a value that would change nothing, so that nobody waits for its effect. A default never is.

        Raises:
            Impossible: field `name` has another value than its default; `why` it means nothing, and a `remedy` besides.
        """
        value, default = getattr(self, name), type(self).model_fields[name].default
        if value != default:
            allowed = f"{json.dumps(default)} (the default)"
            raise SettingError(name, f"has no effect {why}", value=value, allowed=f"{allowed}, or {remedy}" if remedy else allowed)
