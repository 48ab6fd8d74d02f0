"""HTTP requests and replies of the API, without a network: building requests, parsing and checking replies."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oppo_client.errors import ApiError, NotThePlatform, build_error
from oppo_client.retry import retry_after_s
from oppo_client.validation import Shape, shape_error

# Media types of a proxy's or login page, never of the API.
HTML_TYPES = ("text/html", "application/xhtml+xml")


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request to `/api/v1/{path}`. A retry sends the same object, including its idempotency key."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply from `url`, with any status. `headers` is case-insensitive (httpx.Headers)."""

    status: int
    headers: Mapping[str, str]
    content: bytes = field(repr=False, default=b"")
    url: str = ""

    @property
    def ok(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def media_type(self) -> str:
        """Media type without parameters, in lower case."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()


def get(path: str, **params: Any) -> Request:
    """A `GET`. Parameters that are None are omitted; booleans and lists are formatted for the API."""
    return Request("GET", path, {name: _format_param(value) for name, value in params.items() if value is not None})


def post(path: str, body: Mapping[str, Any] | None = None, *, idempotency_key: bool = True) -> Request:
    """A `POST` of JSON. The idempotency key makes a repeated write take effect once; omit it for a read."""
    headers = {"Content-Type": "application/json"} | (_new_key() if idempotency_key else {})
    return Request("POST", path, {}, json.dumps(body or {}, allow_nan=False).encode(), headers)


def delete(path: str) -> Request:
    """A `DELETE` with an idempotency key."""
    return Request("DELETE", path, {}, None, _new_key())


def parse_json(reply: Reply, text: bytes | str, shape: Shape) -> dict[str, Any]:
    """JSON object of a reply. Raises `NotThePlatform` if it is not JSON or does not match `shape` (`validation`)."""
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError:
        raise not_the_platform(reply, "it is no JSON") from None
    if (error := shape_error(value, shape)) is not None:
        raise not_the_platform(reply, error)
    return value


def not_the_platform(reply: Reply, reason: str) -> NotThePlatform:
    """The exception for a successful reply that is not the platform's."""
    text = f"{reply.url} does not respond like the platform ({reason}); check the URL"
    return NotThePlatform(reply.status, "Not the platform", text)


def error_reply(reply: Reply) -> ApiError:
    """The exception for a reply whose status is not 2xx."""
    return build_error(reply.status, reply.headers, reply.content, retry_after_s(reply.headers))


def _new_key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid.uuid4())}


def _format_param(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
