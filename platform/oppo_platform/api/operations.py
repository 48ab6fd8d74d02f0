"""What every operation of the JSON API has in common, around authentication and the deed itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse

from oppo_platform.api.auth import SAFE, person_of
from oppo_platform.api.idempotency import HEADER, once
from oppo_platform.api.limits import Allowance

Run = Callable[..., HttpResponse]


def as_usual(run: Run) -> Run:
    """Decorates an operation: keys of writes are honoured, and the reply tells what is left of the token's minute."""

    @wraps(run)
    def operation(request: HttpRequest, **path: Any) -> HttpResponse:
        answer = _answer(run, request, path)
        allowance: Allowance | None = getattr(request, "allowance", None)
        for name, value in (allowance.headers() if allowance else {}).items():
            answer.headers[name] = value
        return answer

    return operation


def _answer(run: Run, request: HttpRequest, path: dict[str, Any]) -> HttpResponse:
    if HEADER not in request.headers or request.method in SAFE or "Authorization" not in request.headers:
        return run(request, **path)
    user = person_of(request)
    if user is None or user.bound_token_id is None:
        return run(request, **path)  # which says who may
    return once(run, request, user.bound_token_id, **path)
