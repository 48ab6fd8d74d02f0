"""Bodies of `POST runs`, `runs/validate` and `runs/{id}/fork`. The platform parses YAML and applies overrides, not the client."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from oppo_client.errors import Refused
from oppo_client.messages import get, post
from oppo_client.transport import Session
from oppo_client.validation import CREATED, RUN

Source: TypeAlias = str | PathLike[str] | Mapping[str, Any]
Changes: TypeAlias = Mapping[str, Any]


def submit_body(source: Source | None, yaml: str | None, project: str | int | None, overrides: Changes | None) -> dict[str, Any]:
    """The body of `POST runs`.

    Raises `TypeError` unless exactly one of `source` and `yaml` is given, `OSError`, and `Refused` for a file that is not UTF-8.
    """
    if (source is None) == (yaml is None):
        raise TypeError("give a spec as a file or as a mapping, or its text as yaml=…")
    options = ({} if project is None else {"project": project}) | ({"changes": dict(overrides)} if overrides else {})
    if yaml is not None:
        return {"yaml": yaml, **options}
    if isinstance(source, Mapping):
        return {"spec": dict(source), **options}
    assert source is not None
    if isinstance(source, str) and "\n" in source:
        raise TypeError("text is used as a file name; pass YAML as yaml=…")
    try:
        return {"yaml": Path(source).read_text(encoding="utf-8"), **options}
    except UnicodeDecodeError as error:
        raise Refused(
            422, "Unprocessable Content", f"{source} is not UTF-8 text: {error.reason} at byte {error.start}."
        ) from None


def fetch_created_run(session: Session, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Create a run and return its summary. Raises `Refused` with one error per invalid field."""
    created = session.json(post(path, body), CREATED)
    return session.json(get(f"runs/{created['id']}"), RUN)
