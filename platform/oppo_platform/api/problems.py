"""Errors as problem details (RFC 9457), the same for both APIs."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, NotRequired

import structlog
from django.conf import settings
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied, RequestDataTooBig
from django.db import DataError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from ninja import NinjaAPI
from ninja.errors import AuthenticationError, AuthorizationError, HttpError, ValidationError
from typing_extensions import TypedDict

from oppo_contract.spec_errors import SpecError, SpecProblem
from oppo_platform.api.rate_limit import TooMany
from oppo_platform.web.body_limit import TOO_LARGE
from oppo_platform.web.health import is_database_outage
from oppo_platform.web.request_id import current_request_id

UNFORESEEN = "Internal server error. The server's log has the details under this request id."
OUTAGE = "The database cannot be reached. Runs continue; try again later."
NUL = "A text contains the character NUL, which cannot be stored or searched. Remove it."
HALVES = "A text contains a lone surrogate (half of a character), which cannot be stored or searched. Remove it."

log = structlog.get_logger(__name__)


class Problem(TypedDict):
    """Why a request failed (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[SpecComplaint]
    request_id: str | None
    term: NotRequired[str]


class SpecComplaint(TypedDict):
    """One error in a spec: where (a dotted path), the given value, what is allowed, and the nearest valid key."""

    path: str
    message: str
    value: NotRequired[str]
    allowed: NotRequired[str]
    suggestion: NotRequired[str]


def problem(status: int, detail: str, errors: Sequence[SpecProblem] = (), **more: Any) -> JsonResponse:
    """`{"type", "title", "status", "detail", "errors", "request_id"}` with the media type that RFC 9457 wants."""
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "errors": [error.as_dict() for error in errors],
        "request_id": current_request_id(),
        **more,
    }
    return JsonResponse(body, status=status, content_type="application/problem+json")


def unauthenticated(detail: str = "Log in, or send a token as `Authorization: Bearer …`.") -> JsonResponse:
    """401 with the challenge that HTTP asks for."""
    answer = problem(401, detail)
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def spec_refused(error: SpecError) -> JsonResponse:
    """422 with every problem of a spec."""
    count = len(error.problems)
    return problem(422, f"The spec has {count} problem{'s' if count != 1 else ''}.", error.problems)


def too_many(error: TooMany) -> JsonResponse:
    """429 with the rest of the minute."""
    answer = problem(429, str(error))
    for name, value in (error.allowance.headers() | {"Retry-After": str(error.allowance.reset_s)}).items():
        answer.headers[name] = value
    return answer


def install(api: NinjaAPI) -> None:
    """Let an API answer every error as a problem; an unexpected one is a 500 with a log entry of the same request id."""

    def invalid(request: HttpRequest, error: ValidationError) -> HttpResponse:
        parameter = [SpecProblem(".".join(map(str, e["loc"][1:])), e["msg"]) for e in error.errors]
        return problem(422, "The request could not be parsed.", parameter)

    def gone(request: HttpRequest, error: Exception) -> HttpResponse:
        return problem(404, "Not found, or you do not have access.")

    def unforeseen(request: HttpRequest, error: Exception) -> HttpResponse:
        if is_database_outage(error):
            raise error  # `handler500` and `ProblemsEverywhere` make it a 503
        log.error("request failed", path=request.path, exc_info=error)
        return problem(500, UNFORESEEN)

    def unkept(request: HttpRequest, error: DataError) -> HttpResponse:
        return problem(422, NUL) if "NUL" in str(error) else unforeseen(request, error)

    def unspeakable(request: HttpRequest, error: UnicodeEncodeError) -> HttpResponse:
        return problem(422, HALVES) if "surrogates" in error.reason else unforeseen(request, error)

    def too_large(request: HttpRequest, error: RequestDataTooBig) -> HttpResponse:
        return problem(413, TOO_LARGE.format(settings.DATA_UPLOAD_MAX_MEMORY_SIZE))

    api.add_exception_handler(Exception, unforeseen)
    api.add_exception_handler(DataError, unkept)
    api.add_exception_handler(UnicodeEncodeError, unspeakable)
    api.add_exception_handler(RequestDataTooBig, too_large)
    api.add_exception_handler(TooMany, lambda request, error: too_many(error))
    api.add_exception_handler(ValidationError, invalid)
    api.add_exception_handler(SpecError, lambda request, error: spec_refused(error))
    api.add_exception_handler(ObjectDoesNotExist, gone)
    api.add_exception_handler(Http404, gone)
    api.add_exception_handler(
        PermissionDenied, lambda request, error: problem(403, str(error) or "You do not have permission to do this.")
    )
    api.add_exception_handler(AuthenticationError, lambda request, error: unauthenticated())
    api.add_exception_handler(AuthorizationError, lambda request, error: problem(403, "You do not have permission to do this."))
    api.add_exception_handler(HttpError, lambda request, error: problem(error.status_code, str(error)))
