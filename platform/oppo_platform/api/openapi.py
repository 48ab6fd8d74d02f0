"""The API's OpenAPI 3.1 document: what ninja knows of parameters and bodies, and what it does not: replies, problems, examples.

Replies are described from the types of the functions (`replies`), problems from what an operation can meet: everything may be a
401, 429 or 500; what names a thing, a 404; what takes parameters, a 422; what changes something, a 403, 409 or 507.
tests/web/test_api_description.py holds the document to the server's real replies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from http import HTTPStatus
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from django.http import HttpResponseBase
from ninja import NinjaAPI, Status
from ninja.openapi.schema import OpenAPISchema
from ninja.operation import Operation
from pydantic import TypeAdapter

from oppo_platform.api.auth import SAFE
from oppo_platform.api.parameters import meaning_of, meaning_of_field
from oppo_platform.api.schemas import FILES, REPLIES, Problem

EXAMPLES = Path(__file__).with_name("examples.json")
REFERENCE = "#/components/schemas/{model}"
PROBLEM = {"application/problem+json": {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
# Functions whose names say too little outside of their module.
OPERATION_IDS = {
    "validate": "validate_spec", "submit": "submit_run", "show": "show_run", "spec": "download_spec", "cancel": "cancel_run",
    "pause": "pause_run", "resume": "resume_run", "resume_from": "resume_run_at", "extend": "extend_run",
    "metrics": "show_metrics", "usage_of_run": "show_usage", "saved_by_overlap": "show_saving", "decisions": "list_decisions",
    "filter_words": "list_filter_words", "pinned": "list_pinned_runs", "tag": "tag_run",
    "archive": "archive_run", "unarchive": "unarchive_run", "timeline": "show_timeline",
    "figure": "show_timeline_figure", "download": "download_checkpoint", "show_events": "list_events", "views": "list_views",
    "save": "save_view", "set_default": "set_default_view", "change": "change_view", "delete": "delete_run",
    "restore": "restore_run", "purge": "purge_run", "unread": "count_unread_alerts", "seen": "mark_alerts_seen",
    "acknowledge": "acknowledge_alert", "silence": "silence_run", "me": "who_am_i",
    "queue": "show_queue", "cluster": "show_cluster", "quotas": "list_quotas",
    "audit_log": "list_audit_entries", "revoke": "revoke_token",
}  # fmt: skip
OWNERS_READ = ("audit_log", "list_webhooks")
SAYS = {
    401: "No login, or a token that is not valid (any more).",
    403: "Your role, or the token's scope, does not allow it.",
    404: "There is no such thing, or it is another team's.",
    400: "The body is not JSON.",
    413: "The body is too large.",
    409: "It means nothing in the present state; the detail says why.",
    422: "Something is wrong with the request; `errors` says what and where.",
    429: "The token has made its requests of this minute; `Retry-After` says when to try again.",
    500: "Something nobody foresaw; the server's log has it under `request_id`.",
    507: "The database has no room for new runs.",
}  # fmt: skip
KEY = {
    "in": "header", "name": "Idempotency-Key", "required": False, "schema": {"type": "string", "minLength": 1, "maxLength": 200},
    "description": "A random word: the deed happens once, however often the request is sent within a day.",
}  # fmt: skip

RANGES = [
    {"in": "header", "name": "Range", "required": False, "schema": {"type": "string", "pattern": "^bytes=[0-9]+-$"},
     "description": "The rest from a byte on: to go on with what broke off."},
    {"in": "header", "name": "If-Range", "required": False, "schema": {"type": "string"},
     "description": "The `ETag` of what broke off: all of it comes when it is not the same any more."},
]  # fmt: skip


class DescribedAPI(NinjaAPI):
    """A `NinjaAPI` whose document says what each operation answers."""

    def get_openapi_operation_id(self, operation: Operation) -> str:
        """The function's name, or a clearer one."""
        name = operation.view_func.__name__
        return OPERATION_IDS.get(name, name)

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        """The whole document."""
        document = super().get_openapi_schema(**options)
        schemas = document["components"].setdefault("schemas", {})
        operations = {self.get_openapi_operation_id(op): op for op in every_operation(self)}
        schemas.update(_schemas([Problem, *(kind for op in operations.values() if (kind := reply_type(op)) is not None)]))
        for described in (told for path in document["paths"].values() for told in path.values()):
            _complete(described, operations[described["operationId"]], schemas)
        return document


def every_operation(api: NinjaAPI) -> Iterator[Operation]:
    """Each operation once."""
    for _, router in api._routers:
        for view in router.path_operations.values():
            yield from (operation for operation in view.operations if operation.include_in_schema)


def reply_type(operation: Operation) -> Any | None:
    """The type of the JSON that it answers when all went well; None for files and for no content."""
    function = operation.view_func
    if function.__name__ in FILES:
        return None
    if function.__name__ in REPLIES:
        return REPLIES[function.__name__]
    hint = get_type_hints(function).get("return")
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    told = [kind for kind in kinds if kind not in (Any, Status) and not _is_response(kind)]
    declared = [model for model in operation.response_models.values() if isinstance(model, type)]
    if not told and declared:
        return declared[0].model_fields["response"].annotation
    return told[0] if told else None


def _is_response(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, HttpResponseBase)


def _schemas(kinds: list[Any]) -> dict[str, Any]:
    """JSON schemas of every type that replies are made of, by name."""
    adapters = [(kind, "serialization", TypeAdapter(kind)) for kind in dict.fromkeys(kinds)]
    _, document = TypeAdapter.json_schemas(adapters, ref_template=REFERENCE)  # type: ignore[arg-type]
    return dict(document.get("$defs", {}))


def _complete(described: dict[str, Any], operation: Operation, schemas: dict[str, Any]) -> None:
    """Add replies, problems, the key of repeatable writes, and an example."""
    example = examples().get(described["operationId"], {})
    function = operation.view_func.__name__
    code = next(iter(described["responses"]))
    well = described["responses"][code] = {"description": _first_line(operation)}
    content: dict[str, Any] = {}
    if function in FILES:
        media = FILES[function]
        content = {"schema": {"type": "object" if media.endswith(("/json", "yaml")) else "string"}}
    elif (kind := reply_type(operation)) is not None:
        media, schema = "application/json", TypeAdapter(kind).json_schema(mode="serialization", ref_template=REFERENCE)
        schema.pop("$defs", None)
        name = schema.get("title")
        content = {"schema": {"$ref": REFERENCE.format(model=name)} if name in schemas else schema}
    if content:
        well["content"] = {media: content | ({"example": example["reply"]} if "reply" in example else {})}
    for status in _problems(operation):
        described["responses"][status] = {"description": SAYS[status], "content": PROBLEM}
    if operation.methods[0] not in SAFE:
        described.setdefault("parameters", []).append(KEY)
    if function == "download":
        described.setdefault("parameters", []).extend(RANGES)
        described["responses"][206] = {**well, "description": "The rest from that byte on."}
        described["responses"][416] = {"description": "It has no such byte: there is no rest.", "content": PROBLEM}
    if "body" in example and "requestBody" in described:
        described["requestBody"]["content"]["application/json"]["example"] = example["body"]
    for parameter in described.get("parameters", []):
        parameter.setdefault("description", meaning_of(described["operationId"], parameter["name"]))
    _explain_body(described, schemas)
    described["tags"] = [operation.path.split("/")[0]]


def _explain_body(described: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Say of every field of the body what it means."""
    for content in described.get("requestBody", {}).get("content", {}).values():
        body = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        for name, field in body["properties"].items():
            # A reference with words of its own beside it is allowed since OpenAPI 3.1.
            field.setdefault("description", meaning_of_field(described["operationId"], name))


def _problems(operation: Operation) -> list[int]:
    takes = {param.__ninja_param_source__ for param in operation.models}
    found = [401, 429, 500]
    if "path" in takes or "query" in takes or "body" in takes:
        found += [404, 422]
    if "body" in takes:
        found += [400, 413]
    if operation.methods[0] not in SAFE:
        found += [403, 409, 422]
    if operation.view_func.__name__ in OWNERS_READ:
        found.append(403)
    if operation.view_func.__name__ == "download":
        found += [403, 409]
    if operation.view_func.__name__ in ("submit", "fork_run", "fork_checkpoint"):
        found.append(507)
    return sorted(set(found))


def _first_line(operation: Operation) -> str:
    return (operation.view_func.__doc__ or HTTPStatus(200).phrase).splitlines()[0]


@cache
def examples() -> dict[str, Any]:
    """Operation id → `{"path", "body", "reply"}`, recorded from a real server."""
    return json.loads(EXAMPLES.read_text()) if EXAMPLES.exists() else {}
