"""Common handling of operations of the JSON API: idempotency, rate-limit headers, and problem responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils.deprecation import MiddlewareMixin

from oppo_platform.api.auth import SAFE, request_user, sends_token
from oppo_platform.api.idempotency import HEADER, run_once
from oppo_platform.api.problems import UNFORESEEN, problem, too_many
from oppo_platform.api.rate_limit import Allowance, TooMany

NOT_HERE = {
    400: "The request is malformed, or its host is not allowed.",
    404: "No such endpoint. /api/v1/openapi.json lists all endpoints.",
    405: "This endpoint does not support {method}.",
    412: "The current version does not satisfy the request's conditions.",
    500: UNFORESEEN,
}

Run = Callable[..., HttpResponse]


def api_operation(run: Run) -> Run:
    """Decorates an operation with idempotency keys for writes, and rate-limit headers."""

    @wraps(run)
    def operation(request: HttpRequest, **path: Any) -> HttpResponse:
        try:
            answer = _answer(run, request, path)
        except TooMany as error:
            return too_many(error)
        allowance: Allowance | None = getattr(request, "allowance", None)
        for name, value in (allowance.headers() if allowance else {}).items():
            answer.headers[name] = value
        return answer

    return operation


def _answer(run: Run, request: HttpRequest, path: dict[str, Any]) -> HttpResponse:
    if HEADER not in request.headers or request.method in SAFE:
        return run(request, **path)
    user = request_user(request)
    if user is None or (sends_token(request) and user.bound_token_id is None):
        return run(request, **path)  # its authenticator decides
    return run_once(partial(run, request, **path), request, user)


class ProblemsEverywhere(MiddlewareMixin):
    """Django's own errors below `/api/`, for example an unknown URL, become problem details as well."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        """The response, or a problem instead of Django's page."""
        words = NOT_HERE.get(response.status_code)
        if words is None or not request.path.startswith("/api/") or "json" in response.get("Content-Type", ""):
            return response
        answer = problem(response.status_code, words.format(method=request.method))
        if response.has_header("Allow"):
            answer.headers["Allow"] = ", ".join(sorted(response.headers["Allow"].replace(" ", "").split(",")))
        return answer
