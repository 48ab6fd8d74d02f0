"""Specs on their way to the platform: read from a file, changed at dotted paths, forked from another run.

The client knows no YAML: the platform reads it (`POST runs/validate`), so that there is one reader with one set of complaints.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from oppo_client.errors import FieldProblem, Refused, field_problems
from oppo_client.flow import Flow, asked, call, get, post
from oppo_client.retrying import Retries

Source: TypeAlias = str | PathLike[str] | Mapping[str, Any]
Changes: TypeAlias = Mapping[str, Any]


def body_of(source: Source | None, yaml: str | None, project: str | int | None) -> dict[str, Any]:
    """The body of `POST runs`.

    Raises `TypeError` unless exactly one of file or mapping, and text, is given; `OSError`, and `Refused` for a file of no text.
    """
    if (source is None) == (yaml is None):
        raise TypeError("give a spec as a file or as a mapping, or its text as yaml=…")
    more = {} if project is None else {"project": project}
    if yaml is not None:
        return {"yaml": yaml, **more}
    if isinstance(source, Mapping):
        return {"spec": dict(source), **more}
    assert source is not None
    if isinstance(source, str) and "\n" in source:
        raise TypeError("a text is taken for the name of a file; give YAML as yaml=…")
    try:
        return {"yaml": Path(source).read_text(encoding="utf-8"), **more}
    except UnicodeDecodeError as error:
        raise Refused(
            422, "Unprocessable Content", f"{source} is no text in UTF-8: {error.reason} at byte {error.start}."
        ) from None


def validate(body: Mapping[str, Any], overrides: Changes | None, retries: Retries) -> Flow[dict[str, Any]]:
    """The reply of `POST runs/validate` for a spec with its overrides."""
    if overrides:
        body = yield from with_overrides(body, overrides, retries)
    told: dict[str, Any] = yield from asked(post("runs/validate", body, changes=False), retries)
    return told


def submit(body: Mapping[str, Any], overrides: Changes | None, retries: Retries) -> Flow[dict[str, Any]]:
    """The summary of a new run. Raises `Refused` with every complaint."""
    if overrides:
        body = yield from with_overrides(body, overrides, retries)
    born = yield from asked(post("runs", body), retries)
    summary: dict[str, Any] = yield from asked(get(f"runs/{int(born['id'])}"), retries)
    return summary


def with_overrides(body: Mapping[str, Any], overrides: Changes, retries: Retries) -> Flow[dict[str, Any]]:
    """The body with a changed spec. Raises `Refused` when the YAML cannot be read, or a path leads through a value."""
    spec = body.get("spec")
    if spec is None:
        spec = yield from spec_of(body, retries)
    project = {"project": body["project"]} if "project" in body else {}
    return {"spec": changed(spec, overrides), **project}


def spec_of(body: Mapping[str, Any], retries: Retries) -> Flow[dict[str, Any]]:
    """The spec as data, also when something in it is wrong. Raises `Refused` when it cannot be read at all."""
    told = yield from asked(post("runs/validate", body, changes=False), retries)
    if not isinstance(told["spec"], dict):
        raise Refused(422, "Unprocessable Content", "The YAML cannot be read.", errors=field_problems(told["problems"]))
    return dict(told["spec"])


def spec_of_run(run_id: int, retries: Retries) -> Flow[dict[str, Any]]:
    """What a run was asked to do, defaults included."""
    reply = yield from call(get(f"runs/{int(run_id)}/spec.yaml"), retries)
    return (yield from spec_of({"yaml": reply.content.decode()}, retries))


def fork(run: Mapping[str, Any], changes: Changes | None, step: int | None, name: str | None, retries: Retries) -> Flow[Any]:
    """The summary of a new run with another run's spec; with a step, one that begins with its checkpoint of that step."""
    body = {"changes": dict(changes or {}), "step": step, "name": name}
    born = yield from asked(post(f"runs/{int(run['id'])}/fork", body), retries)
    summary: dict[str, Any] = yield from asked(get(f"runs/{int(born['id'])}"), retries)
    return summary


def changed(spec: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy with other values at dotted paths; a number in a path is a place in a list. Missing sections are made.

    Raises `Refused`, as the platform would, for a path that leads through a value. Whether the keys exist the platform says.
    """
    copy = deepcopy(dict(spec))
    problems = [problem for path, value in changes.items() if (problem := _put(copy, path, value)) is not None]
    if problems:
        raise Refused(422, "Unprocessable Content", "These settings cannot be changed.", errors=tuple(problems))
    return copy


def _put(spec: dict[str, Any], path: str, value: Any) -> FieldProblem | None:
    *way, last = path.split(".")
    holder: Any = spec
    for depth, part in enumerate(way):
        if isinstance(holder, dict) and holder.get(part) is None:
            holder[part] = {}
        place = _place(holder, part)
        if place is None or not isinstance(holder[place], dict | list):
            return FieldProblem(path, f"{'.'.join(way[: depth + 1])} is no section", allowed="a path of the spec")
        holder = holder[place]
    place = _place(holder, last)
    if place is None:
        return FieldProblem(path, f"the list has {len(holder)} items", allowed=f"0 to {len(holder) - 1}")
    holder[place] = value
    return None


def _place(holder: Any, part: str) -> Any:
    """The key or the index; None for what is no item of a list."""
    if isinstance(holder, dict):
        return part
    return int(part) if part.isascii() and part.isdigit() and int(part) < len(holder) else None
