"""A body that is too large or compressed is not even read to its end, whoever sends it."""

from __future__ import annotations

import asyncio
import json

import pytest

from oppo_platform.web.body_limit import TIMES_THE_LIMIT

PIECE = 100_000


async def sent(headers, pieces, path="/api/v1/runs"):
    """(status, reply, pieces that were taken) of an anonymous `POST` whose body has so many pieces."""
    from oppo_platform.asgi import application

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": [(b"host", b"localhost"), *headers], "scheme": "http",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    taken, said = [], []

    async def receive():
        if len(taken) == pieces:
            await asyncio.Event().wait()  # the client stays and listens
        taken.append(PIECE)
        return {"type": "http.request", "body": b"x" * PIECE, "more_body": len(taken) < pieces}

    async def send(message):
        said.append(message)

    await application(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in said)
    return said[0]["status"], json.loads(body), len(taken)


@pytest.mark.asyncio
@pytest.mark.django_db(transaction=True)
async def test_a_body_without_an_end_is_not_taken_in(settings):
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 5 * PIECE
    status, told, taken = await sent([(b"transfer-encoding", b"chunked")], 1000)
    assert (status, told["status"], taken) == (413, 413, 5 * TIMES_THE_LIMIT + 1)
    status, _, taken = await sent([(b"content-length", b"100000000")], 1000)
    assert (status, taken) == (413, 0)


@pytest.mark.asyncio
@pytest.mark.django_db(transaction=True)
async def test_small_bodies_are_accepted(settings):
    status, _, taken = await sent([(b"content-type", b"application/json")], 3)
    assert (status, taken) == (401, 3)


@pytest.mark.asyncio
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("path", ["/api/v1/runs", "/api/worker/v1/attempts/1/events", "/accounts/login/"])
@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"gzip, gzip"])
async def test_a_compressed_body_is_not_read(path, encoding):
    """A few kilobytes of gzip become gigabytes."""
    status, problem, taken = await sent([(b"content-encoding", encoding)], 3, path)
    assert (status, problem["detail"], taken) == (415, "The body is compressed; send it without Content-Encoding.", 0)
