"""Shapes of the platform's replies (docs/interfaces.md), as far as the client reads them; additional keys are valid.

A shape is a type, a list of one shape, a mapping from required keys to shapes, or `{EACH: shape of every value}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from types import UnionType
from typing import Any, TypeAlias

Shape: TypeAlias = "type | UnionType | list[Shape] | dict[str, Shape]"

EACH = "*"
NUMBER = int | float
TYPE_NAMES = {
    dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null", datetime: "a time",
}  # fmt: skip
MISSING = object()

RUN: Shape = {
    "id": int, "name": str, "state": str, "reason": str, "step": int, "total_steps": int, "cursor": int, "project": str,
    "user": str | None, "tags": list, "priority": int, "latest": dict, "eta_s": NUMBER | None, "url": str,
}  # fmt: skip
CREATED: Shape = {"id": int}
ME: Shape = {"user": str, "teams": [{"name": str, "role": str}]}
LOG_LINE: Shape = {"id": int, "attempt": int, "stream": str, "text": str, "time": datetime}
LOGS: Shape = {"lines": [LOG_LINE], "next": int, "earlier": bool | None, "ended": bool}
SAMPLE: Shape = {
    "id": int, "step": int, "prompt": str, "response": str, "score": NUMBER | None, "kl": NUMBER | None, "length": int,
    "age": int, "versions": [int], "prompt_key": str,
}  # fmt: skip
COMPARED_PROMPT: Shape = {"prompt_key": str, "change": NUMBER | None, "samples": list}
CHECKPOINT: Shape = {
    "id": int, "step": int, "name": str, "bytes": int, "files": str, "manifest_sha256": str, "registered_at": datetime,
}  # fmt: skip
QUEUED: Shape = {
    "run": {"id": int, "name": str}, "place": object, "code": object, "text": object, "sooner": object, "estimated_start": object,
    "priority": object,
}  # fmt: skip
COLUMNS: Shape = {EACH: {"step": list, "x": list, "y": list}}
METRICS: Shape = {"series": COLUMNS, "last_step": int}
VALIDATION: Shape = {"ok": bool, "problems": list, "spec": dict | None, "yaml": str | None}
BUBBLE: Shape = {"device": str, "cause": str, "step": int, "start_s": NUMBER, "length_s": NUMBER, "words": str}
TIMELINE: Shape = {"lanes": list, "steps": [{"step": int}], "worst": [BUBBLE]}
FIGURE: Shape = {"data": list, "layout": dict}
COMPARISON: Shape = {
    "runs": [{"id": int, "name": str, "state": str}], "target": NUMBER | None, "baseline": int, "series": {EACH: COLUMNS},
    "config_diff": [{"path": str, "values": dict}], "time_to_target": {EACH: dict | None}, "speedup": dict,
    "figures": {EACH: {"reward_last_tenth": object, "step_s": object, "bubble": object, "wall_s": object}},
    "groups": [{"value": object, "runs": list, "reached": int, "step": object, "elapsed_s": object, "speedup": dict | None}],
}  # fmt: skip


def page_of(item: Shape) -> Shape:
    """Shape of one page of a listing."""
    return {"items": [item], "next": str | None}


def shape_error(value: Any, shape: Shape, path: str = "") -> str | None:
    """The first mismatch, such as "`items` is missing" or "`step` is a text, not a number"; None if the value matches.

    `path` is the dotted path of the value, empty for the whole reply.
    """
    if isinstance(shape, dict) and isinstance(value, dict):
        expected = dict.fromkeys(value, shape[EACH]) if EACH in shape else shape
        members = ((value.get(key, MISSING), inner, f"{path}.{key}" if path else str(key)) for key, inner in expected.items())
        return _first_error(members)
    if isinstance(shape, list) and isinstance(value, list):
        return _first_error((item, shape[0], path) for item in value)
    if value is MISSING:
        return f"`{path}` is missing"
    if isinstance(shape, dict | list) or not _matches(value, shape):
        return f"{f'`{path}`' if path else 'it'} is {_type_name(type(value))}, not {_shape_name(shape)}"
    return None


def _first_error(members: Iterable[tuple[Any, Shape, str]]) -> str | None:
    return next((error for each in members if (error := shape_error(*each)) is not None), None)


def _matches(value: Any, kind: type | UnionType) -> bool:
    if kind is not datetime:
        return isinstance(value, kind)
    try:
        return bool(datetime.fromisoformat(value))
    except (TypeError, ValueError):
        return False


def _shape_name(shape: Shape) -> str:
    if isinstance(shape, dict | list):
        return _type_name(type(shape))
    return " or ".join(dict.fromkeys(map(_type_name, shape.__args__ if isinstance(shape, UnionType) else (shape,))))


def _type_name(kind: type) -> str:
    return TYPE_NAMES.get(kind, "a number")
