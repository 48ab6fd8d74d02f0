"""The client's address, for the audit log."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from ipaddress import ip_address
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.utils.decorators import sync_and_async_middleware

from oppo_platform.accounts.audit import record_address


@sync_and_async_middleware
def audit_origin(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """Middleware: audit entries of a request get the client's address."""
    if iscoroutinefunction(get_response):

        async def in_turn(request: HttpRequest) -> Any:
            with record_address(client_address(request)):
                return await get_response(request)

        return in_turn

    def at_once(request: HttpRequest) -> Any:
        with record_address(client_address(request)):
            return get_response(request)

    return at_once


def client_address(request: HttpRequest) -> str | None:
    """The address reported by the one trusted proxy, or, without a proxy, the peer's; None on a local socket."""
    forwarded = request.headers.get("X-Forwarded-For", "") if settings.OPPO_BEHIND_PROXY else ""
    address = forwarded.rpartition(",")[2].strip() or request.META.get("REMOTE_ADDR", "")
    try:
        return str(ip_address(address))
    except ValueError:
        return None
