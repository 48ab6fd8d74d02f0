"""Refuses oversized and compressed request bodies before they reach the disk.

Django reads a request's body into a temporary file before authentication, and decompresses none.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from django.conf import settings

# Bodies up to this size are read, so that a slightly too large one is refused in the usual way, with an id.
TIMES_THE_LIMIT = 2
TOO_LARGE = "The body is larger than {:,} bytes."

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def bounded(app: App) -> App:
    """The ASGI application, with 413 for oversized bodies as early as possible, and 415 for compressed ones."""

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        most = TIMES_THE_LIMIT * settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        if scope["type"] == "http" and _header(scope, b"content-encoding") not in (b"", b"identity"):
            await _refuse(send, 415, "The body is compressed; send it without Content-Encoding.")
        elif scope["type"] == "http" and int(_header(scope, b"content-length") or 0) > most:
            await _refuse(send, 413, TOO_LARGE.format(settings.DATA_UPLOAD_MAX_MEMORY_SIZE))
        elif scope["type"] == "http":
            await _Bounded(app, receive, send, most).serve(scope)
        else:
            await app(scope, receive, send)

    return application


class _Bounded:
    """One request with an absent or wrong length."""

    def __init__(self, app: App, receive: Receive, send: Send, most: int) -> None:
        self._app, self._receive, self._send, self._left = app, receive, send, most
        self._begun = False

    async def serve(self, scope: Message) -> None:
        await self._app(scope, self._next, self._pass_on)
        if self._left < 0 and not self._begun:
            await _refuse(self._send, 413, TOO_LARGE.format(settings.DATA_UPLOAD_MAX_MEMORY_SIZE))

    async def _next(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        return message if self._left >= 0 else {"type": "http.disconnect"}

    async def _pass_on(self, message: Message) -> None:
        self._begun = True
        await self._send(message)


def _header(scope: Message, name: bytes) -> bytes:
    """A header's value, empty if absent; the server has validated that a Content-Length is a number."""
    return next((value for key, value in scope["headers"] if key == name), b"")


async def _refuse(send: Send, status: int, detail: str) -> None:
    body = {
        "type": "about:blank", "title": HTTPStatus(status).phrase, "status": status,
        "detail": detail, "errors": [], "request_id": None,
    }  # fmt: skip
    headers = [(b"content-type", b"application/problem+json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
