"""docs/reference/api.md: API calls from the OpenAPI document, required roles from the permission tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from oppo_platform.accounts.models import Role
from oppo_platform.api.openapi import KEY, MEANINGS, examples
from oppo_platform.api.v1 import described
from oppo_platform.pages.api_page import TITLES
from scripts.reference.markdown import GENERATED, block, code, linked, table
from tests.web.matrix.operations import OPERATIONS
from tests.web.matrix.rows import ANYBODY, Row

HEAD = f"""\
# API

{GENERATED} from the OpenAPI document, which a platform serves at `/api/v1/openapi.json` and renders at `/api`.
Paths are relative to `/api/v1/`. Errors, idempotent writes, ETags, rate limits and RunSummary are described in
[interfaces](../interfaces.md#browser--platform-json-under-apiv1), tokens and scopes in [tokens](../tokens.md). The
[notebook client](../client.md) wraps these calls. A test makes each call with every role and scope.

- **Role**: the minimum role in the team. Where it is maintainer, the owner of the run or view may make the call too.
- **Scope**: the minimum scope of a token; a browser session needs none.
- Writes accept the header `{KEY["name"]}`: {KEY["description"]}
- `next` of a list is the cursor of the next page, if there is one.

Every call may return 401, 429, 500 and 503; other errors are listed with the calls.

{table(("status", "means"), ((code(str(status)), says) for status, says in sorted(MEANINGS.items())))}
"""
COMMON_ERRORS = {"401", "429", "500", "503"}
MAX_EXAMPLE_LINES = 30


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for tag, members in groupby(sorted(calls(), key=_tag_position), key=lambda call: call[2]["tags"][0]):
        parts.append(f"## {TITLES.get(tag, tag.capitalize())}\n")
        parts += [_section(*call) for call in members]
    return "\n".join(parts)


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, OpenAPI operation) of every call."""
    document = json.loads(json.dumps(described()))
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path.removeprefix("/api/v1/"), operation


def minimum_scope(row: Row) -> str:
    """Minimum scope of a token: `read` acts as a viewer at most, `submit` as a maintainer (docs/tokens.md)."""
    if row.admin or row.least == Role.OWNER:
        return "admin"
    return "submit" if row.writes or row.least not in (Role.VIEWER, ANYBODY) else "read"


def _tag_position(call: tuple[str, str, dict[str, Any]]) -> int:
    tags = list(TITLES)
    return tags.index(tag) if (tag := call[2]["tags"][0]) in tags else len(tags)


def _section(method: str, path: str, operation: dict[str, Any]) -> str:
    status, success = next(iter(operation["responses"].items()))
    row = OPERATIONS[operation["operationId"]]
    role = "everybody" if row.least == ANYBODY else row.least
    media = "".join(f" ({kind})" for kind in success.get("content", {}) if kind != "application/json")
    others = [code(number) for number in operation["responses"] if number not in COMMON_ERRORS | {status, "206"}]
    errors = f" **Errors** {', '.join(others)}." if others else ""
    parts = [
        f"### {operation['summary']}\n",
        block(f"{method} {path}", "text"),
        linked(success["description"]) + "\n",
        f"**Role**: {role}. **Scope**: `{minimum_scope(row)}`. **Returns** {status}{media}.{errors}\n",
    ]
    rows = [_parameter(each) for each in operation.get("parameters", []) if each["name"] != KEY["name"]]
    if rows := rows + list(body_fields(operation)):
        parts.append(table(("parameter", "in", "type", "default", "meaning"), rows))
    return "\n".join([*parts, *_example(operation["operationId"])])


def body_fields(operation: dict[str, Any]) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows of the request body's fields."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return
    schema = _resolved(content["schema"])
    for name, field in schema["properties"].items():
        yield _parameter({"name": name, "in": "body", "required": name in schema.get("required", ()), "schema": field, **field})


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    schemas: dict[str, dict[str, Any]] = described()["components"]["schemas"]
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _parameter(parameter: dict[str, Any]) -> tuple[str, str, str, str, str]:
    schema = parameter["schema"]
    kinds = [_resolved(each) for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    types = " or ".join(", ".join(map(code, each["enum"])) if "enum" in each else each.get("type", "any") for each in kinds)
    default = schema.get("default")
    shown = "**required**" if parameter.get("required") else code("" if default in (None, "") else json.dumps(default))
    return code(parameter["name"]), parameter["in"], types, shown, linked(parameter.get("description", ""))


def _example(operation: str) -> Iterator[str]:
    example = examples().get(operation)
    if example is None:
        return
    request = f"{OPERATIONS[operation].method.upper()} /api/v1/{example['path']}"
    shown = [block(request, "http")]
    shown += [block(_truncate(example[part]), "json") for part in ("body", "reply") if example.get(part) is not None]
    yield "\n".join(['<details markdown="1"><summary>Example</summary>\n', *shown, "</details>\n"])


def _truncate(value: Any) -> str:
    lines = json.dumps(value, indent=2, ensure_ascii=False).splitlines()
    return "\n".join(lines if len(lines) <= MAX_EXAMPLE_LINES else [*lines[:MAX_EXAMPLE_LINES], "…"])
