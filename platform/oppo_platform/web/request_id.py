"""Request ids: in the response's `X-Request-Id`, in problem details, and in every log line of the request."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware
from structlog.contextvars import bound_contextvars, get_contextvars

# Clients may send their own; restricted characters, so that it cannot break a log line.
GIVEN = re.compile(r"[A-Za-z0-9._-]{1,64}")


def current_request_id() -> str | None:
    """The id of the current request; None outside of one."""
    return get_contextvars().get("request_id")


@sync_and_async_middleware
def request_id(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Middleware: give the request its id."""
    if iscoroutinefunction(get_response):

        async def in_turn(request: HttpRequest) -> Any:
            number = _id_of(request)
            with bound_contextvars(request_id=number):
                response = await get_response(request)
            response.headers["X-Request-Id"] = number
            return response

        return in_turn

    def at_once(request: HttpRequest) -> Any:
        number = _id_of(request)
        with bound_contextvars(request_id=number):
            response = get_response(request)
        response.headers["X-Request-Id"] = number
        return response

    return at_once


def _id_of(request: HttpRequest) -> str:
    given = request.headers.get("X-Request-Id", "")
    return given if GIVEN.fullmatch(given) else uuid.uuid4().hex
