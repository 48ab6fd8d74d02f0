"""Describes the fields of a spec from `RunSpec`'s JSON schema: allowed values as text, for errors and docs/configuration.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
ALLOWED = "x-allowed"  # key in json_schema_extra: description of the allowed values, for fields with a pattern


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """Documentation of one field. `path` is dotted; `default` is JSON, None for sections and required fields."""

    path: str
    allowed: str
    default: str | None
    is_required: bool
    description: str
    is_section: bool


@dataclass(frozen=True, slots=True)
class FieldLocation:
    """The field that a pydantic error refers to: its path in the spec, and its schema.

    `branch` is the union member that pydantic tried, with the length of the union's own path.
    """

    path: tuple[str | int, ...]
    schema: Schema
    branch: tuple[int, Schema] | None


class SpecSchema:
    """A pydantic model's JSON schema; resolves references."""

    def __init__(self, schema: Schema) -> None:
        self.root = schema

    def resolve(self, schema: Schema) -> Schema:
        """Follow a `$ref`; the field's own description and default override the section's."""
        if "$ref" not in schema:
            return schema
        target: Schema = self.root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        return {**target, **{key: value for key, value in schema.items() if key != "$ref"}}

    def union_members(self, schema: Schema) -> list[Schema]:
        """The members of a union without null; for other schemas, the schema itself."""
        options = [self.resolve(option) for option in schema.get("anyOf", [schema])]
        return [option for option in options if option.get("type") != "null"]

    def locate(self, location: tuple[str | int, ...]) -> FieldLocation:
        """Find the field for pydantic's `loc`, which contains the tried member after each union."""
        path: list[str | int] = []
        at, branch = self.root, None
        for part in location:
            options = self.union_members(at)
            if len(options) > 1:
                at = next((option for option in options if _is_branch(option, str(part))), options[0])
                branch = (len(path), at)
                continue
            at = self._inside(options[0], part) if options else {}
            path.append(part)
        return FieldLocation(tuple(path), at, branch)

    def _inside(self, schema: Schema, part: str | int) -> Schema:
        inner: Schema = schema.get("items", {}) if isinstance(part, int) else schema.get("properties", {}).get(part, {})
        return self.resolve(inner)

    def keys(self, schema: Schema) -> list[str]:
        """The keys of a section, sorted; empty for other schemas."""
        return sorted(key for option in self.union_members(schema) for key in option.get("properties", {}))

    def enum_values(self, schema: Schema) -> list[str]:
        """The text values of a choice; empty for other schemas."""
        return [word for option in self.union_members(schema) for word in option.get("enum", []) if isinstance(word, str)]

    def describe(self, schema: Schema) -> str:
        """The allowed values as a phrase, such as `an integer, 1 to 64`."""
        if not schema:
            return ""
        phrases = [schema[ALLOWED]] if ALLOWED in schema else [self._phrase(option) for option in self.union_members(schema)]
        if any(option.get("type") == "null" for option in schema.get("anyOf", [])):
            phrases.append("null")
        return ", or ".join(phrases)

    def _phrase(self, schema: Schema) -> str:
        if ALLOWED in schema:
            return str(schema[ALLOWED])
        if "enum" in schema:
            return "one of " + ", ".join(str(word) for word in schema["enum"])
        if "const" in schema:
            return json.dumps(schema["const"])
        match schema.get("type"):
            case "boolean":
                return "true or false"
            case "integer":
                return "an integer" + _range(schema)
            case "number":
                return "a number" + _range(schema)
            case "array":
                return f"a list{_count(schema, 'Items', 'items')}, each {self.describe(self.resolve(schema['items']))}"
            case "object":
                return "a mapping with " + ", ".join(self.keys(schema))
            case _:
                return "text" + _count(schema, "Length", "characters")

    def field_docs(self, schema: Schema | None = None, prefix: str = "") -> Iterator[FieldDoc]:
        """Every field in the order of the spec, a section before its fields."""
        schema = self.root if schema is None else schema
        for key, field in schema["properties"].items():
            inner = self.resolve(field)
            sections, suffix = [option for option in self.union_members(inner) if "properties" in option], ""
            for listed in (option for option in self.union_members(inner) if option.get("type") == "array"):
                sections += [item for item in self.union_members(self.resolve(listed["items"])) if "properties" in item]
                suffix = "[]"
            default = json.dumps(inner["default"]) if "default" in inner else None
            required = key in schema.get("required", [])
            yield FieldDoc(prefix + key, self.describe(inner), default, required, inner.get("description", ""), bool(sections))
            for section in sections:
                yield from self.field_docs(section, f"{prefix}{key}{suffix}.")


def _is_branch(option: Schema, tried: str) -> bool:
    # pydantic's `loc` has ModelSpec, or function-after[its_validator(), ModelSpec].
    title = option.get("title")
    return title is not None and (tried == title or tried.endswith(f", {title}]"))


def _range(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    multiple = f", a multiple of {schema['multipleOf']}" if "multipleOf" in schema else ""
    if low is not None and high is not None:
        return f", {low} to {high}{multiple}"
    bounds = [
        f"{low} or more" if low is not None else "",
        f"above {above}" if above is not None else "",
        f"at most {high}" if high is not None else "",
        f"below {below}" if below is not None else "",
    ]
    return "".join(f", {bound}" for bound in bounds if bound) + multiple


def _count(schema: Schema, what: str, unit: str) -> str:
    low, high = schema.get(f"min{what}"), schema.get(f"max{what}")
    if low is not None and high is not None:
        return f" of {low} to {high} {unit}"
    return f" of {low} {unit} or more" if low is not None else f" of at most {high} {unit}" if high is not None else ""
