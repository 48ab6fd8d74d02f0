"""The API reference page: every call with its parameters, responses and an example, from the OpenAPI document."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.views.decorators.http import require_GET

from oppo_platform.api.openapi import examples
from oppo_platform.api.v1 import described

TITLES = {"runs": "Runs", "compare": "Comparing", "stream": "Live stream", "views": "Saved views", "storage": "Storage",
          "trash": "Trash", "alerts": "Alerts", "queue": "Queue", "cluster": "Cluster", "quotas": "Quotas", "teams": "Teams",
          "me": "You", "tokens": "API tokens"}  # fmt: skip


@require_GET
def api_page(request: HttpRequest) -> HttpResponse:
    """All calls by topic."""
    calls = [
        _call(path, method, operation) for path, methods in described()["paths"].items() for method, operation in methods.items()
    ]
    order = {tag: place for place, tag in enumerate(TITLES)}
    calls.sort(key=lambda call: order.get(call["tag"], len(order)))
    groups = [(TITLES.get(tag, tag), tag, list(members)) for tag, members in groupby(calls, key=lambda call: call["tag"])]
    return render(request, "api.html", {"section": "teams", "groups": groups, "base_url": settings.OPPO_BASE_URL})


def _call(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    status, well = next(iter(operation["responses"].items()))
    example = examples().get(operation["operationId"], {})
    return {
        "id": operation["operationId"],
        "tag": operation["tags"][0],
        "method": method.upper(),
        "path": path.removeprefix("/api/v1/"),
        "summary": operation["summary"],
        "says": _with_code(operation.get("description", "")),
        "parameters": [_parameter(parameter) for parameter in operation.get("parameters", [])],
        "status": status,
        "media": next(iter(well.get("content", {})), ""),
        "problems": [(code, parameter["description"]) for code, parameter in operation["responses"].items() if code != status],
        "body": _shown(example.get("body")),
        "reply": _shown(example.get("reply")),
        "asked": example.get("path", ""),
    }


def _parameter(parameter: dict[str, Any]) -> dict[str, Any]:
    schema = parameter["schema"]
    kinds = [each.get("type", "") for each in schema.get("anyOf", [schema])]
    words = [kind for kind in kinds if kind not in ("", "null")]
    choices = [each for part in schema.get("anyOf", [schema]) for each in part.get("enum", [])]
    default = schema.get("default")
    return {
        "name": parameter["name"],
        "place": parameter["in"],
        "kind": ", ".join(map(str, choices)) or " or ".join(words) or "text",
        "required": parameter.get("required", False),
        "default": "" if default in (None, "") else json.dumps(default),
        "says": parameter.get("description", schema.get("description", "")),
    }


def _with_code(words: str) -> SafeString:
    """A docstring with its `names` as code."""
    parts = enumerate(words.split("`"))
    return format_html_join("", "{}", ((format_html("<code>{}</code>", part) if at % 2 else part,) for at, part in parts))


def _shown(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) if value is not None else ""
