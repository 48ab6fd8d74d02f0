"""Exceptions of the client, all subclasses of `OppoError`, and parsing of problem details (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

MAX_DETAIL = 300


class OppoError(Exception):
    """Base of all errors of this package."""


class ConfigError(OppoError):
    """No URL or token, or an invalid configuration file."""


class Unreachable(OppoError):
    """No reply, or a broken connection, after all retries."""


class WaitTimeout(OppoError, TimeoutError):
    """The timeout of `Run.wait` is over. The run continues."""


class RunFailed(OppoError):
    """`Run.wait(check=True)`: the run ended in a state other than `succeeded`."""


class MissingPackage(OppoError, ImportError):
    """An optional package is missing; the message says how to install it."""


class UnknownMetric(OppoError, LookupError):
    """The run has no such metric."""


class NoCheckpoint(OppoError, LookupError):
    """The run has no such checkpoint."""


class DownloadError(OppoError):
    """The download differs from the registered checkpoint, or cannot be written."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One invalid field. `path` is dotted (`overlap.overcommit.max`), empty for the whole request."""

    path: str
    message: str
    value: str | None = None
    allowed: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        more = {"given": self.value, "allowed": self.allowed, "did you mean": self.suggestion}
        details = "; ".join(f"{name}: {text}" for name, text in more.items() if text)
        return f"{self.path or 'the request'}: {self.message}" + (f" ({details})" if details else "")


class ApiError(OppoError):
    """An error reply of the platform, from its problem details (RFC 9457).

    Attributes:
        status: the HTTP status.
        title, detail, type: text and type of the problem.
        errors: invalid fields of the request.
        request_id: identifies the call in the platform's log, if known.
        retry_after_s: seconds until a retry may succeed, if known.
        more: other members of the reply (`term`: the part of a filter that is invalid).
    """

    def __init__(
        self,
        status: int,
        title: str,
        detail: str = "",
        *,
        type: str = "about:blank",
        errors: tuple[FieldProblem, ...] = (),
        request_id: str | None = None,
        retry_after_s: float | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        self.status, self.title, self.detail, self.type, self.errors = status, title, detail, type, errors
        self.request_id, self.retry_after_s, self.more = request_id, retry_after_s, dict(more or {})
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [f"{self.status} {self.title}" + (f": {self.detail}" if self.detail else "")]
        lines += [f"  {error}" for error in self.errors]
        if self.request_id:
            lines.append(f"  request id: {self.request_id}")
        return "\n".join(lines)


class Unauthenticated(ApiError):
    """401: no token, or an invalid one."""


class Forbidden(ApiError):
    """403: the token or its user lacks the permission."""


class NotFound(ApiError):
    """404: it does not exist, or belongs to another team."""


class Conflict(ApiError):
    """409: not possible in the current state."""


class Refused(ApiError):
    """422: invalid request; `errors` lists the fields."""


class TooManyRequests(ApiError):
    """429: the token's rate limit is exceeded, also after waiting."""


class ServerFault(ApiError):
    """5xx: an error of the platform."""


class NoRoom(ServerFault):
    """507: the database has no space for new runs."""


class NotThePlatform(ApiError):
    """The reply is not from OPPO Platform: a proxy's page or a redirect. Check the URL."""


ERROR_CLASSES: dict[int, type[ApiError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    422: Refused,
    429: TooManyRequests,
    507: NoRoom,
}


def build_error(status: int, headers: Mapping[str, str], content: bytes, retry_after_s: float | None = None) -> ApiError:
    """The exception for an error reply. `headers` is case-insensitive (httpx.Headers)."""
    if 300 <= status < 400:
        return NotThePlatform(status, _reason_phrase(status), f"it points to {headers.get('Location', 'nowhere')}; check the URL")
    problem = _parse_problem(content)
    if problem is None:
        text = content[: 4 * MAX_DETAIL].decode("utf-8", "replace").strip()
        problem = {"detail": text[:MAX_DETAIL] if "<" not in text else ""}
    known = {name: problem.pop(name, None) for name in ("type", "title", "status", "detail", "errors", "request_id")}
    error_class = ERROR_CLASSES.get(status, ServerFault if status >= 500 else ApiError)
    return error_class(
        status,
        str(known["title"] or _reason_phrase(status)),
        str(known["detail"] or ""),
        type=str(known["type"] or "about:blank"),
        errors=_parse_field_problems(known["errors"]),
        request_id=_text(known["request_id"]) or headers.get("X-Request-Id"),
        retry_after_s=retry_after_s,
        more=problem,
    )


def _parse_field_problems(errors: Any) -> tuple[FieldProblem, ...]:
    """The `errors` of a reply, without malformed ones."""
    items = [item for item in errors if isinstance(item, dict)] if isinstance(errors, list) else []
    names = ("value", "allowed", "suggestion")
    return tuple(
        FieldProblem(str(item.get("path", "")), str(item.get("message", "")), *(_text(item.get(name)) for name in names))
        for item in items
    )


def _reason_phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "unknown status"


def _parse_problem(content: bytes) -> dict[str, Any] | None:
    try:
        problem = json.loads(content)
    except ValueError:
        return None
    return problem if isinstance(problem, dict) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
