"""Errors in a spec as data: path, given value, allowed values and the nearest valid key."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from oppo_contract.aliases import our_setting
from oppo_contract.fields import FieldLocation, SpecSchema
from oppo_contract.retired import find_retired

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic_core import ErrorDetails

SHOWN_VALUE_LENGTH = 80
MAX_PROBLEMS = 50

# Messages by pydantic error type; `SpecProblem.allowed` says what is valid.
MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "unknown key",
    "invalid_key": "keys must be text",
    "literal_error": "is not one of the choices",
    "model_type": "is not a mapping",
    "list_type": "is not a list",
    "int_type": "is not an integer",
    "int_from_float": "is not an integer",
    "float_type": "is not a number",
    "string_type": "is not text",
    "bool_type": "is not true or false",
    "finite_number": "is not finite",
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "multiple_of": "is not a valid multiple",
    "string_too_short": "is too short",
    "string_too_long": "is too long",
    "string_pattern_mismatch": "contains characters that are not allowed",
    "too_short": "has too few items",
    "too_long": "has too many items",
}


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One error. `path` is dotted (`overlap.overcommit.max`); empty for the whole document."""

    path: str
    message: str
    value: str | None = None
    allowed: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        text = f"{self.path or 'the spec'}: {self.message}"
        if self.value is not None:
            text += f" (given: {self.value})"
        if self.allowed:
            text += f"; allowed: {self.allowed}"
        if self.suggestion:
            text += f"; did you mean {self.suggestion}?"
        return text

    def as_dict(self) -> dict[str, str]:
        """The fields as JSON-ready text, without empty ones."""
        return {name: text for name, text in asdict(self).items() if text is not None}


class SpecError(ValueError):
    """An invalid spec, with all errors."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class SettingError(ValueError):
    """Raised by a section's validator for values that are valid alone but not together.

    `field` is the key to change, dotted and relative to the section; `allowed` describes valid values.
    """

    def __init__(self, field: str, message: str, *, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(message)


def translate_errors(error: ValidationError, model: type[BaseModel], data: Any) -> list[SpecProblem]:
    """Translate pydantic's errors about `data`, validated as `model`."""
    schema = SpecSchema(model.model_json_schema())
    located = [(detail, schema.locate(detail["loc"])) for detail in error.errors(include_url=False)]
    relevant = [(detail, field) for detail, field in located if _in_matching_branch(field, data)]
    problems = [_translate(detail, field, schema) for detail, field in relevant[:MAX_PROBLEMS]]
    if len(relevant) > MAX_PROBLEMS:
        problems.append(SpecProblem("", f"has {len(relevant) - MAX_PROBLEMS} more problems"))
    return problems


def nearest_match(word: str, words: Sequence[str]) -> str | None:
    """The most similar of `words`, ignoring case; None if none is similar."""
    by_lower = {other.lower(): other for other in words}
    close = difflib.get_close_matches(word.lower()[:100], list(by_lower), n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def _in_matching_branch(field: FieldLocation, data: Any) -> bool:
    # pydantic reports an error for each member of a union: keep those of the member that the given value resembles.
    if field.branch is None:
        return True
    length, branch = field.branch
    return isinstance(_value_at(data, field.path[:length]), dict) == (branch.get("type") == "object")


def _value_at(data: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        data = data[part]
    return data


def _translate(detail: ErrorDetails, field: FieldLocation, schema: SpecSchema) -> SpecProblem:
    kind, given = detail["type"], detail["input"]
    path = ".".join(str(part) for part in field.path)
    if kind == "value_error":
        return _from_setting_error(path, detail["ctx"]["error"])
    if (entry := find_retired(path, given)) is not None:
        return SpecProblem(path, entry.message, _shown(given), entry.allowed)
    if kind == "extra_forbidden":
        keys = schema.keys(schema.locate(field.path[:-1]).schema)
        near = our_setting(path) or nearest_match(str(field.path[-1]), keys)
        if near and (last := near.rpartition(".")[2]) != near and last in keys:  # the setting of that name in this section
            near = ".".join([*map(str, field.path[:-1]), last])
        return SpecProblem(path, MESSAGES[kind], _shown(given), "one of " + ", ".join(keys), near)
    at = schema.locate(field.path[: field.branch[0]]).schema if field.branch and kind == "literal_error" else field.schema
    near = nearest_match(given, schema.enum_values(at)) if kind == "literal_error" and isinstance(given, str) else None
    value = None if kind == "missing" else _shown(given)
    return SpecProblem(path, MESSAGES.get(kind, detail["msg"]), value, schema.describe(at) or None, near)


def _from_setting_error(section: str, error: Exception) -> SpecProblem:
    if not isinstance(error, SettingError):
        return SpecProblem(section, str(error))
    path = ".".join(part for part in (section, error.field) if part)
    return SpecProblem(path, str(error), _shown(error.value), error.allowed)


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        # Such as an integer of more than 4,300 digits, or a mapping as a key.
        return "a value that cannot be displayed"
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[: SHOWN_VALUE_LENGTH - 1] + "…"
