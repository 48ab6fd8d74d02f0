"""The API's OpenAPI 3.1 document: ninja's output, completed by rules that hold for all operations.

An operation's texts are beside its code: summary, docstring, descriptions of parameters and fields, and the annotated return
type, which documents the response without converting it (tests/web/api/test_openapi.py checks real responses against it).
Added here: problem responses, the `Idempotency-Key` header of writes, and recorded examples.
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
from pydantic import GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from oppo_contract.spec import RunSpec
from oppo_platform.api.auth import SAFE
from oppo_platform.api.problems import Problem

EXAMPLES = Path(__file__).with_name("examples.json")
REFERENCE = "#/components/schemas/{model}"
PROBLEM = {"application/problem+json": {"schema": {"$ref": REFERENCE.format(model="Problem")}}}
MEANINGS = {
    400: "The body is not JSON.",
    401: "Not logged in, or the token is invalid or expired.",
    403: "Your role or the token's scope does not allow this.",
    404: "Not found, or it belongs to another team.",
    409: "Not possible in the current state; `detail` says why.",
    413: "The body is too large.",
    416: "The range is beyond the end of the file.",
    422: "The request is invalid; `errors` lists each problem and its place.",
    429: "The token's request limit per minute is reached; `Retry-After` says when to retry.",
    500: "Internal error; the server's log has the details under `request_id`.",
    503: "The database cannot be reached; `Retry-After` says when to retry.",
    507: "The database has no space for new runs.",
}
KEY = {
    "in": "header", "name": "Idempotency-Key", "required": False, "schema": {"type": "string", "minLength": 1, "maxLength": 200},
    "description": "A random key: requests with the same key within a day are executed once.",
}  # fmt: skip


STREAM = {
    "operationId": "stream",
    "summary": "Summaries of runs whenever they change, as server-sent events",
    "description": "One event `run` per change, at most four a second per run; its data is a RunSummary, and its id the position"
    " of all runs, to be sent as `Last-Event-ID` or `cursor` when reconnecting. Comments keep the connection open.",
    "tags": ["stream"],
    "parameters": [
        {"in": "query", "name": "runs", "required": True, "schema": {"type": "string"},
         "description": "Numbers of runs, separated by commas."},
        {"in": "query", "name": "cursor", "required": False, "schema": {"type": "string", "pattern": "^([0-9]+:[0-9]+(,|$))*$"},
         "description": "Position of each run, `run:number,…`; runs that have changed since are sent at once."},
        {"in": "header", "name": "Last-Event-ID", "required": False, "schema": {"type": "string"},
         "description": "As `cursor`, sent by browsers that reconnect."},
    ],
    "responses": {
        200: {"description": "The stream.", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
        **{status: {"description": MEANINGS[status], "content": PROBLEM} for status in (401, 404, 422, 429, 500, 503)},
    },
}  # fmt: skip


class DescribedAsSpec:
    """Annotation of a body's spec: documented as `RunSpec`, but checked by `check_spec`, whose problems have suggestions."""

    @classmethod
    def __get_pydantic_json_schema__(cls, _: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(RunSpec.__pydantic_core_schema__)


def problems(*statuses: int) -> dict[str, Any]:
    """An operation's `openapi_extra`: problems in addition to those that follow from its method and parameters."""
    return {"responses": {status: {} for status in statuses}}


def file(media: str) -> dict[str, Any]:
    """An operation's `openapi_extra`: it responds with a file of this media type."""
    # YAML has no type here: some clients validate the parsed object, others read the text.
    types = {"application/json": {"type": "object"}, "application/yaml": {}}
    return {"responses": {200: {"content": {media: {"schema": types.get(media, {"type": "string"})}}}}}


class DescribedAPI(NinjaAPI):
    """A `NinjaAPI` whose document has the response and the problems of each operation."""

    def get_openapi_operation_id(self, operation: Operation) -> str:
        """The function's name, unless the operation has an id."""
        return operation.operation_id or operation.view_func.__name__

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        """The whole document. Raises ValueError if a response and a body have different schemas under one name."""
        document = super().get_openapi_schema(**options)
        schemas = document["components"].setdefault("schemas", {})
        operations = {self.get_openapi_operation_id(op): op for op in every_operation(self)}
        replies = _schemas([Problem, *(kind for op in operations.values() if (kind := reply_type(op)) is not None)])
        if twice := sorted(name for name in replies.keys() & schemas.keys() if replies[name] != schemas[name]):
            raise ValueError(f"two schemas have the name {twice[0]}: rename the response's type")
        schemas.update(replies)
        for described in (entry for path in document["paths"].values() for entry in path.values()):
            _complete(described, operations[described["operationId"]], schemas)
        document["paths"][f"{self.get_root_path({})}stream"] = {"get": STREAM}
        return document


def every_operation(api: NinjaAPI) -> Iterator[Operation]:
    """Each operation once."""
    for _, router in api._routers:
        for view in router.path_operations.values():
            yield from (operation for operation in view.operations if operation.include_in_schema)


def reply_type(operation: Operation) -> Any | None:
    """Type of a successful JSON response, from the annotation or ninja's `response`; None for files and no content."""
    hint = get_type_hints(operation.view_func).get("return")
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    annotated = [kind for kind in kinds if kind not in (Any, Status) and not _is_response(kind)]
    declared = [model for model in operation.response_models.values() if isinstance(model, type)]
    if not annotated and declared:
        return declared[0].model_fields["response"].annotation
    return annotated[0] if annotated else None


def _is_response(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, HttpResponseBase)


def _schemas(kinds: list[Any]) -> dict[str, Any]:
    """JSON schemas of all response types, by name."""
    adapters = [(kind, "serialization", TypeAdapter(kind)) for kind in dict.fromkeys(kinds)]
    _, document = TypeAdapter.json_schemas(adapters, ref_template=REFERENCE)  # type: ignore[arg-type]
    return dict(document.get("$defs", {}))


def _complete(described: dict[str, Any], operation: Operation, schemas: dict[str, Any]) -> None:
    """Add the response, problems, the idempotency key of writes, and an example."""
    example = examples().get(described["operationId"], {})
    responses = described["responses"]
    success = responses[next(iter(responses))]
    success["description"] = _first_line(operation)
    if (kind := reply_type(operation)) is not None:
        success["content"] = {"application/json": {"schema": _schema(kind, schemas)}}
    for content in success.get("content", {}).values():
        content.update({"example": example["reply"]} if "reply" in example else {})
    for status in {*_problems(operation), *(code for code in responses if code >= HTTPStatus.BAD_REQUEST)}:
        responses[status] = {"description": MEANINGS[status], "content": PROBLEM}
    described["responses"] = dict(sorted(responses.items()))
    if operation.methods[0] not in SAFE:
        described["parameters"].append(KEY)
    if "body" in example and "requestBody" in described:
        described["requestBody"]["content"]["application/json"]["example"] = example["body"]
    described["tags"] = [operation.path.split("/")[0]]


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """A response's schema, by reference if it has a name."""
    schema = TypeAdapter(kind).json_schema(mode="serialization", ref_template=REFERENCE)
    schema.pop("$defs", None)
    name = schema.get("title")
    return {"$ref": REFERENCE.format(model=name)} if name in schemas else schema


def _problems(operation: Operation) -> set[int]:
    """Problem responses that follow from an operation's method and parameters."""
    sources = {param.__ninja_param_source__ for param in operation.models}
    result = {401, 429, 500, 503}
    if sources & {"path", "query", "body"}:
        result |= {404, 422}
    if "body" in sources:
        result |= {400, 413}
    if operation.methods[0] not in SAFE:
        result |= {403, 409, 422}
    return result


def _first_line(operation: Operation) -> str:
    return (operation.view_func.__doc__ or HTTPStatus(200).phrase).splitlines()[0]


@cache
def examples() -> dict[str, Any]:
    """Operation id → `{"path", "body", "reply"}`, recorded from a real server."""
    return json.loads(EXAMPLES.read_text()) if EXAMPLES.exists() else {}
