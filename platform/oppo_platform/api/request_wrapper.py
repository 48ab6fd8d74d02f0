"""Common handling of operations of the JSON API: idempotency, rate-limit headers, and problem responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.deprecation import MiddlewareMixin
from ninja.operation import Operation

from oppo_contract.spec_errors import SpecProblem, nearest_match
from oppo_platform.api.auth import SAFE, request_user, sends_token
from oppo_platform.api.idempotency import HEADER, run_once
from oppo_platform.api.problems import OUTAGE, UNFORESEEN, problem, too_many
from oppo_platform.api.rate_limit import Allowance, TooMany

NOT_HERE = {
    400: "The request is malformed, or its host is not allowed.",
    404: "No such endpoint. /api/v1/openapi.json lists all endpoints.",
    405: "This endpoint does not support {method}.",
    412: "The current version does not satisfy the request's conditions.",
    500: UNFORESEEN,
    503: OUTAGE,
}

Run = Callable[..., HttpResponse]


def api_operation(run: Run) -> Run:
    """Decorates ninja's `Operation.run`: unknown query parameters, idempotency keys for writes, and rate-limit headers."""
    known = _query_parameters(run.__self__)  # type: ignore[attr-defined]

    @wraps(run)
    def operation(request: HttpRequest, **path: Any) -> HttpResponse:
        try:
            answer = _unknown_parameters(request, known) or _answer(run, request, path)
        except TooMany as error:
            return too_many(error)
        allowance: Allowance | None = getattr(request, "allowance", None)
        for name, value in (allowance.headers() if allowance else {}).items():
            answer.headers[name] = value
        return answer

    return operation


def _query_parameters(operation: Operation) -> list[str]:
    models = [model for model in operation.models if model.__ninja_param_source__ == "query"]
    return sorted(name for model in models for name in getattr(model, "__ninja_flatten_map__", model.model_fields))


def _unknown_parameters(request: HttpRequest, known: list[str]) -> HttpResponse | None:
    """422 for query parameters that the operation does not have; None for an unauthenticated request, whose answer is 401."""
    unknown = sorted(request.GET.keys() - known)
    if not unknown or request_user(request) is None:
        return None
    has = f"its query parameters are {', '.join(known)}" if known else "it has no query parameters"
    errors = [SpecProblem(name, "is not a parameter", suggestion=nearest_match(name, known)) for name in unknown]
    return problem(422, f"This operation does not know {', '.join(unknown)}; {has}.", errors)


def _answer(run: Run, request: HttpRequest, path: dict[str, Any]) -> HttpResponse:
    if HEADER not in request.headers or request.method in SAFE:
        return run(request, **path)
    user = request_user(request)
    if user is None or (sends_token(request) and user.bound_token_id is None):
        return run(request, **path)  # its authenticator decides
    return run_once(partial(run, request, **path), request, user)


class HeadRequests(MiddlewareMixin):
    """HEAD below `/api/v1/` is answered as GET, without the body: ninja's operations have GET alone."""

    def process_request(self, request: HttpRequest) -> None:
        """Let the operation see a GET."""
        request.is_head = request.method == "HEAD" and request.path.startswith("/api/v1/")  # type: ignore[attr-defined]
        if request.is_head:  # type: ignore[attr-defined]
            request.method = "GET"

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """The response of that GET with its headers only."""
        if not request.is_head:  # type: ignore[attr-defined]
            return response
        if isinstance(response, HttpResponse):
            response.headers["Content-Length"] = str(len(response.content))
            response.content = b""
            return response
        answer = HttpResponse(status=response.status_code, headers=dict(response.items()))
        response.close()
        return answer


class ProblemsEverywhere(MiddlewareMixin):
    """Django's own errors below `/api/`, for example an unknown URL, become problem details as well."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """The response, or a problem instead of Django's page."""
        words = NOT_HERE.get(response.status_code)
        if words is None or not request.path.startswith("/api/") or "json" in response.get("Content-Type", ""):
            return response
        answer = problem(response.status_code, words.format(method=request.method))
        if response.has_header("Retry-After"):
            answer.headers["Retry-After"] = response.headers["Retry-After"]
        if response.has_header("Allow"):
            answer.headers["Allow"] = ", ".join(sorted(response.headers["Allow"].replace(" ", "").split(",")))
        return answer
