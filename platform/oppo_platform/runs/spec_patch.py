"""Changes values at dotted paths of a spec. The schema validates the keys afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from oppo_contract.spec_errors import SpecError, SpecProblem


def apply_changes(spec: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with changed values; a number in a path is an index of a list, and missing sections are created.

    Raises:
        SpecError: a path leads through a value, or to an invalid index.
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
    """The key, or the index in a list; None if a list has no such index."""
    if isinstance(holder, dict):
        return part
    return int(part) if part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(holder) else None
