"""Specs on their way to the platform: read from a file, with other values at dotted paths, forked from another run.

The client knows no YAML and changes nothing itself: the platform does, so that there is one reader with one set of complaints.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from oppo_client.errors import Refused
from oppo_client.retry import Retries
from oppo_client.sans_io import Flow, asked, call, get, post
from oppo_client.validation import BORN, CHECKED, RUN

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
        raise TypeError("text is used as a file name; pass YAML as yaml=…")
    try:
        return {"yaml": Path(source).read_text(encoding="utf-8"), **more}
    except UnicodeDecodeError as error:
        raise Refused(
            422, "Unprocessable Content", f"{source} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from None


def with_changes(body: Mapping[str, Any], overrides: Changes | None) -> dict[str, Any]:
    """The body with other values at dotted paths, which the platform puts in."""
    return {**body, "changes": dict(overrides)} if overrides else dict(body)


def validate(body: Mapping[str, Any], overrides: Changes | None, retries: Retries) -> Flow[dict[str, Any]]:
    """The reply of `POST runs/validate` for a spec with its overrides."""
    told: dict[str, Any] = yield from asked(post("runs/validate", with_changes(body, overrides), changes=False), retries, CHECKED)
    return told


def submit(body: Mapping[str, Any], overrides: Changes | None, retries: Retries) -> Flow[dict[str, Any]]:
    """The summary of a new run. Raises `Refused` with every complaint."""
    born = yield from asked(post("runs", with_changes(body, overrides)), retries, BORN)
    summary: dict[str, Any] = yield from asked(get(f"runs/{born['id']}"), retries, RUN)
    return summary


def spec_of_run(run_id: int, retries: Retries) -> Flow[dict[str, Any]]:
    """What a run was asked to do, defaults included."""
    reply = yield from call(get(f"runs/{int(run_id)}/spec.yaml"), retries)
    asks = post("runs/validate", {"yaml": reply.content.decode("utf-8", "replace")}, changes=False)
    told = yield from asked(asks, retries, {"spec": dict})
    return dict(told["spec"])


def fork(run: Mapping[str, Any], changes: Changes | None, step: int | None, name: str | None, retries: Retries) -> Flow[Any]:
    """The summary of a new run with another run's spec; with a step, one that begins with its checkpoint of that step."""
    body = {"changes": dict(changes or {}), "step": step, "name": name}
    born = yield from asked(post(f"runs/{int(run['id'])}/fork", body), retries, BORN)
    summary: dict[str, Any] = yield from asked(get(f"runs/{born['id']}"), retries, RUN)
    return summary
