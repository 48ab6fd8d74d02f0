"""docs/reference/api.md: every call of the API, from the OpenAPI document; who may make it, from the tests' matrix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from oppo_platform.accounts.models import Role
from oppo_platform.api.openapi import KEY, MEANINGS, examples
from oppo_platform.api.v1 import described
from oppo_platform.pages.api_page import TITLES
from scripts.reference.markdown import WRITTEN, block, code, linked, table
from tests.web.matrix.operations import OPERATIONS
from tests.web.matrix.rows import ANYBODY, Row

HEAD = f"""\
# API

{WRITTEN}, from the OpenAPI document that a platform serves under `/api/v1/openapi.json` (its page `/api` shows it, too).
Paths begin with `/api/v1/`. What holds for every call (errors, writes that are repeated, ETags, rates, RunSummary) is in
[interfaces](../interfaces.md#browser--platform-json-under-apiv1), tokens and scopes are in [tokens](../tokens.md), and the
[notebook client](../client.md) makes the calls for you. A test makes each of them by every role and with every scope.

- **May**: the least role in the team. Where it is maintainer, the member whose run or view it is may as well.
- **Scope**: the least that a token needs; a browser's session needs none.
- Whatever changes something takes the header `{KEY["name"]}`: {KEY["description"]}
- Lists end with `next`, the cursor of the page after, where there may be more.

A problem is one of these. Every call may meet 401, 429 and 500; the others are listed with the calls.

{table(("status", "means"), ((code(str(status)), says) for status, says in sorted(MEANINGS.items())))}
"""
EVERY_TIME = {"401", "429", "500"}
LONGEST_EXAMPLE = 30


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for tag, members in groupby(sorted(calls(), key=_place), key=lambda call: call[2]["tags"][0]):
        parts.append(f"## {TITLES.get(tag, tag.capitalize())}\n")
        parts += [_section(*call) for call in members]
    return "\n".join(parts)


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, what the document says) of every operation."""
    document = json.loads(json.dumps(described()))
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            yield method.upper(), path.removeprefix("/api/v1/"), told


def scope_of(row: Row) -> str:
    """The least scope of a token: one that reads acts as a viewer at most, one that submits as a maintainer (docs/tokens.md)."""
    if row.admin or row.least == Role.OWNER:
        return "admin"
    return "submit" if row.writes or row.least not in (Role.VIEWER, ANYBODY) else "read"


def _place(call: tuple[str, str, dict[str, Any]]) -> int:
    tags = list(TITLES)
    return tags.index(tag) if (tag := call[2]["tags"][0]) in tags else len(tags)


def _section(method: str, path: str, told: dict[str, Any]) -> str:
    status, well = next(iter(told["responses"].items()))
    row = OPERATIONS[told["operationId"]]
    role = "everybody" if row.least == ANYBODY else row.least
    media = "".join(f" ({kind})" for kind in well.get("content", {}) if kind != "application/json")
    others = [code(number) for number in told["responses"] if number not in EVERY_TIME | {status, "206"}]
    problems = f" **Problems** {', '.join(others)}." if others else ""
    parts = [
        f"### {told['summary']}\n",
        block(f"{method} {path}", "text"),
        linked(well["description"]) + "\n",
        f"**May**: {role}. **Scope**: `{scope_of(row)}`. **Answers** {status}{media}.{problems}\n",
    ]
    if rows := [_parameter(each) for each in told.get("parameters", []) if each["name"] != KEY["name"]] + list(body_fields(told)):
        parts.append(table(("parameter", "in", "type", "default", "meaning"), rows))
    return "\n".join([*parts, *_example(told["operationId"])])


def body_fields(told: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """The fields of its body."""
    content = told.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return
    schema = _resolved(content["schema"])
    for name, field in schema["properties"].items():
        yield _parameter({"name": name, "in": "body", "required": name in schema.get("required", ()), "schema": field, **field})


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema
    if "$ref" in schema:
        found = described()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _parameter(told: dict[str, Any]) -> tuple[str, str, str, str, str]:
    schema = told["schema"]
    kinds = [_resolved(each) for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    words = " or ".join(", ".join(map(code, each["enum"])) if "enum" in each else each.get("type", "any") for each in kinds)
    default = schema.get("default")
    shown = "**required**" if told.get("required") else code("" if default in (None, "") else json.dumps(default))
    return code(told["name"]), told["in"], words, shown, linked(told.get("description", ""))


def _example(operation: str) -> Iterator[str]:
    found = examples().get(operation)
    if found is None:
        return
    asked = [f"{OPERATIONS[operation].method.upper()} /api/v1/{found['path']}"]
    shown = [block("\n".join(asked), "http")]
    shown += [block(_cut(found[part]), "json") for part in ("body", "reply") if found.get(part) is not None]
    yield "\n".join(['<details markdown="1"><summary>Example</summary>\n', *shown, "</details>\n"])


def _cut(value: Any) -> str:
    lines = json.dumps(value, indent=2, ensure_ascii=False).splitlines()
    return "\n".join(lines if len(lines) <= LONGEST_EXAMPLE else [*lines[:LONGEST_EXAMPLE], "…"])
