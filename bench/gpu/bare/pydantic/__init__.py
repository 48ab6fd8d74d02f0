"""A stand-in for pydantic where there is none and no way to get one. It stands at the end of `sys.path`: the real one wins.

It fills in defaults, builds nested sections, refuses unknown keys and runs the validators that concern a whole section. It
does not check ranges, patterns or types: a bench's own specs are checked by the real one in the tests, which also compare the
two field by field.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

MISSING: Any = object()
_UNIONS = (Union, types.UnionType)
_VALIDATES = "_validates_when"


class ValidationError(ValueError):
    """What `model_validate` raises for an unknown or missing key."""


class FieldInfo:
    """A field's default; what else was told of it is forgotten."""

    def __init__(self, default: Any = MISSING, default_factory: Callable[[], Any] | None = None) -> None:
        self.default = MISSING if default is ... else default
        self.default_factory = default_factory

    def value(self) -> Any:
        """The default, or `MISSING` where a value must be given."""
        return self.default_factory() if self.default_factory is not None else self.default


def Field(default: Any = MISSING, *, default_factory: Callable[[], Any] | None = None, **told: Any) -> Any:
    """A field with a default; the rest is not looked at."""
    return FieldInfo(default, default_factory)


def ConfigDict(**settings: Any) -> dict[str, Any]:
    """A model's settings, of which `frozen` counts."""
    return settings


def model_validator(*, mode: str) -> Callable[[Any], Any]:
    """Marks a method that checks a whole model once it is built."""

    def mark(function: Any) -> Any:
        setattr(function, _VALIDATES, mode)
        return function

    return mark


class _Fields:
    """`model_fields` of a class, read when first asked for: its annotations may name what comes later in the module."""

    def __get__(self, instance: object, owner: type[BaseModel]) -> dict[str, FieldInfo]:
        found: dict[str, FieldInfo] | None = owner.__dict__.get("_fields")
        if found is None:
            found = {}
            for name, hint in _hints(owner).items():
                given = next((base.__dict__[name] for base in owner.__mro__ if name in base.__dict__), _told_in(hint))
                found[name] = given if isinstance(given, FieldInfo) else FieldInfo(given)
            owner._fields = found  # type: ignore[attr-defined]
        return found


class BaseModel:
    """Fields by annotation, with defaults; equal to another one of the same class with the same values."""

    model_config: ClassVar[dict[str, Any]] = {}
    model_fields = _Fields()

    def __init__(self, **given: Any) -> None:
        fields, hints = type(self).model_fields, _hints(type(self))
        unknown = sorted(set(given) - set(fields))
        if unknown:
            raise ValidationError(f"{type(self).__name__}: unknown keys: {', '.join(unknown)}")
        for name, field in fields.items():
            value = _built(hints[name], given[name]) if name in given else field.value()
            if value is MISSING:
                raise ValidationError(f"{type(self).__name__}: {name} is required")
            self.__dict__[name] = value
        self.__dict__["model_fields_set"] = set(given)
        for check in _validators(type(self)):
            check(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self.model_config.get("frozen"):
            raise ValidationError(f"{type(self).__name__} is frozen")
        self.__dict__[name] = value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self.model_dump_json()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._values().items())})"

    def _values(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in type(self).model_fields}

    @classmethod
    def model_validate(cls, data: Any) -> Any:
        """A model from plain data. Raises ValidationError for an unknown or missing key, and what its validators raise."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise ValidationError(f"{cls.__name__} is not a mapping")
        return cls(**data)

    def model_copy(self, *, update: dict[str, Any] | None = None) -> Any:
        """The same with other values, which are not checked."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__ | (update or {}))
        return copied

    def model_dump(self, *, mode: str = "python", exclude_none: bool = False, **ignored: Any) -> dict[str, Any]:
        """Plain data."""
        dumped = {name: _plain(value, exclude_none) for name, value in self._values().items()}
        return {name: value for name, value in dumped.items() if not (exclude_none and value is None)}

    def model_dump_json(self, **settings: Any) -> str:
        """The same as JSON; numbers that are not finite as words."""
        return json.dumps(_spelt(self.model_dump(**settings)), separators=(",", ":"), ensure_ascii=False)


class TypeAdapter:
    """Builds what an annotation says; of several models the one whose constant fields fit."""

    def __init__(self, annotation: Any) -> None:
        self._annotation = annotation

    def __class_getitem__(cls, annotation: Any) -> type[TypeAdapter]:
        return cls

    def validate_python(self, data: Any) -> Any:
        """A value from plain data."""
        return _built(self._annotation, data)

    def validate_json(self, text: str | bytes) -> Any:
        """A value from JSON."""
        return self.validate_python(json.loads(text))


def _hints(cls: type) -> dict[str, Any]:
    """Annotations of a class's fields, those of its bases first."""
    found: dict[str, Any] | None = cls.__dict__.get("_annotated")
    if found is None:
        every = get_type_hints(cls, include_extras=True)
        found = {n: hint for n, hint in every.items() if not n.startswith(("_", "model_")) and get_origin(hint) is not ClassVar}
        cls._annotated = found  # type: ignore[attr-defined]
    return found


def _told_in(hint: Any) -> Any:
    """The default of a field that stands in its annotation."""
    return next((told for told in getattr(hint, "__metadata__", ()) if isinstance(told, FieldInfo)), MISSING)


def _validators(cls: type) -> list[Callable[[Any], Any]]:
    """Those of the bases first, each name once."""
    named = {name: value for base in reversed(cls.__mro__) for name, value in base.__dict__.items() if hasattr(value, _VALIDATES)}
    return list(named.values())


def _built(hint: Any, value: Any) -> Any:
    """`value` as the annotation says: nested models from mappings, whole numbers as floats where those are asked for."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in _UNIONS:
        return _built(_alternative(arguments, value), value)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint.model_validate(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is list:
        return [_built(arguments[0], item) for item in value]
    if origin is dict:
        return {key: _built(arguments[1], item) for key, item in value.items()}
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else arguments
        return tuple(_built(kind, item) for kind, item in zip(kinds, value, strict=True))
    return value


def _alternative(choices: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that a value is meant for."""
    plain = [get_args(choice)[0] if get_origin(choice) is Annotated else choice for choice in choices]
    if value is None:
        return type(None)
    if isinstance(value, dict):
        models = [choice for choice in plain if isinstance(choice, type) and issubclass(choice, BaseModel)]
        fitting = [model for model in models if _constants_fit(model, value)]
        return (fitting or models or plain)[0]
    if isinstance(value, BaseModel):
        return type(value)
    return next((choice for choice in plain if not (isinstance(choice, type) and issubclass(choice, BaseModel))), plain[0])


def _constants_fit(model: type[BaseModel], data: dict[str, Any]) -> bool:
    constants = {name: get_args(hint) for name, hint in _hints(model).items() if get_origin(hint) is Literal}
    return all(data[name] in allowed for name, allowed in constants.items() if name in data)


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=exclude_none)
    if isinstance(value, dict):
        return {key: _plain(item, exclude_none) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, exclude_none) for item in value)
    return value


def _spelt(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _spelt(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelt(item) for item in value]
    return value
