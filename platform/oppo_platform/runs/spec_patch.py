"""Other values at dotted paths of a spec. Whether the keys exist the schema says afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from oppo_contract.spec_errors import SpecError, SpecProblem


def changed(spec: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with other values; a number in a path is a place in a list, and missing sections are made.

    Raises:
        SpecError: paths lead through a value, or to no place of a list.
    """
    copy = deepcopy(dict(spec))
    problems = [problem for path, value in changes.items() if (problem := _put(copy, path, value)) is not None]
    if problems:
        raise SpecError(problems)
    return copy


def _put(spec: dict[str, Any], path: str, value: Any) -> SpecProblem | None:
    *way, last = path.split(".")
    holder: Any = spec
    for depth, part in enumerate(way):
        if isinstance(holder, dict) and holder.get(part) is None:
            holder[part] = {}
        place = _place(holder, part)
        if place is None or not isinstance(holder[place], dict | list):
            return SpecProblem(path, f"{'.'.join(way[: depth + 1])} is not a section", allowed="a path of the spec")
        holder = holder[place]
    place = _place(holder, last)
    if place is None:
        return SpecProblem(path, f"the list has {len(holder)} items", allowed=f"0 to {len(holder) - 1}")
    holder[place] = value
    return None


def _place(holder: dict[str, Any] | list[Any], part: str) -> Any:
    """The key, or the index in a list; None where a list has none such."""
    if isinstance(holder, dict):
        return part
    return int(part) if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(holder) else None
