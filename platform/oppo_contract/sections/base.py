"""What every section of the spec is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from oppo_contract.fields import ALLOWED

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
