"""What can go wrong, and what it says. Everything that this package raises on purpose is an `OppoError`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

LONGEST_SHOWN = 300


class OppoError(Exception):
    """The base of all errors of this package."""


class ConfigError(OppoError):
    """No address or token, or a configuration file that cannot be used."""


class Unreachable(OppoError):
    """The platform did not answer, or broke off; also after all repetitions."""


class WaitTimeout(OppoError, TimeoutError):
    """What was waited for had not come about in time. The run itself goes on."""


class RunFailed(OppoError):
    """A run that was waited for with `check=True` ended in another state than `succeeded`."""


class MissingPackage(OppoError, ImportError):
    """An optional package is needed for this; the message says how to install it."""


class UnknownMetric(OppoError, LookupError):
    """A run has no such metric."""


class NoCheckpoint(OppoError, LookupError):
    """A run has no such checkpoint."""


class DownloadError(OppoError):
    """What was downloaded is not what was registered, or cannot be kept here."""


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One complaint about what was sent. `path` is dotted (`overlap.overcommit.max`), empty for all of it."""

    path: str
    message: str
    value: str | None = None
    allowed: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        more = {"given": self.value, "allowed": self.allowed, "did you mean": self.suggestion}
        told = "; ".join(f"{name}: {text}" for name, text in more.items() if text)
        return f"{self.path or 'the request'}: {self.message}" + (f" ({told})" if told else "")


class ApiError(OppoError):
    """The platform refused a call, as problem details (RFC 9457) say it.

    Attributes:
        status: the HTTP status.
        title, detail, type: the problem in words, and its kind.
        errors: what is wrong with which field of what was sent.
        request_id: by which the platform's log tells of this call; None when it was not told.
        retry_after_s: after so many seconds another try may do; None when that was not said.
        more: whatever else the reply held (`term`: the part of a filter that was not understood).
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
    """401: no token, or one that is void."""


class Forbidden(ApiError):
    """403: the token, or whoever it acts as, may not do this."""


class NotFound(ApiError):
    """404: it is not there, or another team's."""


class Conflict(ApiError):
    """409: it means nothing in the present state."""


class Refused(ApiError):
    """422: what was sent will not do; `errors` says why, field by field."""


class TooManyRequests(ApiError):
    """429: this token's minute is used up, also after waiting."""


class ServerFault(ApiError):
    """5xx: something went wrong on the platform."""


class NoRoom(ServerFault):
    """507: the platform's database has no room for new runs."""


class NotThePlatform(ApiError):
    """Something answered, but not as OPPO Platform does: a proxy's page, a redirection. Look at the address."""


KINDS: dict[int, type[ApiError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    422: Refused,
    429: TooManyRequests,
    507: NoRoom,
}


def error_of(status: int, headers: Mapping[str, str], content: bytes, retry_after_s: float | None = None) -> ApiError:
    """The exception for a reply that is no success. `headers` are looked up in any case (httpx.Headers)."""
    if 300 <= status < 400:
        return NotThePlatform(status, phrase(status), f"it points to {headers.get('Location', 'nowhere')}; check the URL")
    told = _problem(content)
    if told is None:
        text = content[: 4 * LONGEST_SHOWN].decode("utf-8", "replace").strip()
        told = {"detail": text[:LONGEST_SHOWN] if "<" not in text else ""}
    known = {name: told.pop(name, None) for name in ("type", "title", "status", "detail", "errors", "request_id")}
    kind = KINDS.get(status, ServerFault if status >= 500 else ApiError)
    return kind(
        status,
        str(known["title"] or phrase(status)),
        str(known["detail"] or ""),
        type=str(known["type"] or "about:blank"),
        errors=field_problems(known["errors"]),
        request_id=_text(known["request_id"]) or headers.get("X-Request-Id"),
        retry_after_s=retry_after_s,
        more=told,
    )


def field_problems(told: Any) -> tuple[FieldProblem, ...]:
    """Complaints from the `errors` of a reply; what is not in their form is left out."""
    found = [item for item in told if isinstance(item, dict)] if isinstance(told, list) else []
    names = ("value", "allowed", "suggestion")
    return tuple(
        FieldProblem(str(item.get("path", "")), str(item.get("message", "")), *(_text(item.get(name)) for name in names))
        for item in found
    )


def phrase(status: int) -> str:
    """The usual name of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "unknown status"


def _problem(content: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(content)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
