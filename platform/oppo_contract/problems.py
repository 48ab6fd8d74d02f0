"""Complaints about a spec, as data: where, what was given, what is allowed, and the nearest valid key."""

from __future__ import annotations

import difflib
import json
import types
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

SHOWN_VALUE_LENGTH = 80


@dataclass(frozen=True, slots=True)
class SpecProblem:
    """One complaint. `path` is dotted (`overlap.overcommit.max`); empty for the document as a whole."""

    path: str
    message: str
    value: str | None = None
    allowed: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        said = f"{self.path or 'the spec'}: {self.message}"
        if self.value is not None:
            said += f" (given: {self.value})"
        if self.allowed:
            said += f"; allowed: {self.allowed}"
        if self.suggestion:
            said += f"; did you mean {self.suggestion}?"
        return said

    def as_dict(self) -> dict[str, str]:
        """The complaint as JSON-ready text fields, the empty ones left out."""
        fields = {"path": self.path, "message": self.message, "value": self.value, "allowed": self.allowed, "suggestion": self.suggestion}
        return {key: text for key, text in fields.items() if text is not None}


class SpecError(ValueError):
    """A spec that was refused, with every reason at once."""

    def __init__(self, problems: list[SpecProblem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def problems_of(error: ValidationError, model: type[BaseModel], data: Any) -> list[SpecProblem]:
    """Translate pydantic's complaints about `data`, checked against `model`, into the field's own words."""
    details = error.errors(include_url=False)
    mappings = {_location(d)[:-1] for d in details if d["type"] in ("extra_forbidden", "missing")}
    # A field that takes a word or a mapping complains twice; a mapping was meant when its keys were looked at.
    told = [d for d in details if not (d["type"] == "literal_error" and _location(d) in mappings)]
    return [_problem(detail, model) for detail in told]


def nearest(word: str, words: list[str]) -> str | None:
    """The most similar of `words`, or None when nothing is close."""
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return close[0] if close else None


def _problem(detail: Any, model: type[BaseModel]) -> SpecProblem:
    location = _location(detail)
    path = ".".join(str(part) for part in location)
    given = _shown(detail["input"])
    if detail["type"] == "extra_forbidden":
        keys = sorted(_section_at(model, location[:-1]))
        return SpecProblem(path, "unknown key", given, "one of " + ", ".join(keys), nearest(str(location[-1]), keys))
    if detail["type"] == "missing":
        return SpecProblem(path, "is required")
    if detail["type"] == "literal_error":
        options = detail["ctx"]["expected"]
        near = nearest(str(detail["input"]), [o.strip("'") for o in options.replace(" or ", ", ").split(", ")])
        return SpecProblem(path, "is not one of the choices", given, options, near)
    if detail["type"] == "value_error":
        return SpecProblem(path, str(detail["ctx"]["error"]))
    message = detail["msg"].removeprefix("Input ")
    return SpecProblem(path, message[:1].lower() + message[1:], given)


def _location(detail: Any) -> tuple[Any, ...]:
    return tuple(part for part in detail["loc"] if not _names_a_type(part))


def _names_a_type(part: Any) -> bool:
    # In a union pydantic adds the branch it tried to the path, as a class name or as literal[...].
    return isinstance(part, str) and (part.startswith(("literal[", "function-")) or part[:1].isupper())


def _section_at(model: type[BaseModel], location: tuple[Any, ...]) -> set[str]:
    for part in location:
        field = model.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return set()
        model = inner
    return set(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for found in map(_model_in, get_args(annotation)) if found), None)
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN_VALUE_LENGTH else text[: SHOWN_VALUE_LENGTH - 1] + "…"
