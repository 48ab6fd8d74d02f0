"""The web process's handler: one thread serves a request from its first signal to its last; streams end with their client."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from asgiref.sync import sync_to_async
from django.core.signals import request_finished, request_started
from django.db import connection
from django.http import HttpResponse, StreamingHttpResponse

from oppo_platform.accounts.models import User
from oppo_platform.asgi import OneThread

pytestmark = [pytest.mark.asyncio, pytest.mark.django_db(transaction=True)]
DEADLINE_S = 20


class Client:
    """One request of an ASGI server, and what it received."""

    def __init__(self, view):
        self.handler, self.messages, self.leaves = OneThread(), [], asyncio.Event()
        self.handler.get_response = view
        self.first_part = asyncio.Event()

    async def request(self):
        """The body of the response, after it has ended."""
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b"", "server": ("localhost", 80)}
        bodies = iter([{"type": "http.request"}])

        async def receive():
            if (message := next(bodies, None)) is None:
                await self.leaves.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message):
            self.messages.append(message)
            if message.get("body"):
                self.first_part.set()

        await asyncio.wait_for(self.handler(scope, receive, send), DEADLINE_S)
        return b"".join(message.get("body", b"") for message in self.messages)


@pytest.fixture
def signals():
    """Threads of a request's first and last signal."""
    seen = []

    def record(**_):
        seen.append(threading.current_thread().name)

    for signal in (request_started, request_finished):
        signal.connect(record)
    yield seen
    for signal in (request_started, request_finished):
        signal.disconnect(record)


def connections_in_use() -> int:
    stats = connection.pool.get_stats()
    return stats["pool_size"] - stats["pool_available"]


async def test_a_request_is_served_by_one_thread_that_serves_the_next_one_too(signals):
    def view(_):
        signals.append(threading.current_thread().name)
        return HttpResponse(User.objects.count())

    client, before = Client(view), connections_in_use()
    for _ in range(3):
        client.messages.clear()
        assert await client.request() == b"0"
    assert len(signals) == 9
    assert len(set(signals)) == 1
    assert connections_in_use() == before


async def test_content_that_reads_the_database_gives_its_connection_back(signals):
    async def content():
        for _ in range(2):
            yield str(await sync_to_async(User.objects.count)())

    def view(_):
        User.objects.exists()
        return StreamingHttpResponse(content())

    before = connections_in_use()
    assert await Client(view).request() == b"00"
    assert len(signals) == 2
    assert connections_in_use() == before


async def test_a_stream_ends_when_its_client_leaves(signals):
    ended = []

    async def endless():
        try:
            while True:
                yield "x"
                await asyncio.sleep(0)
        finally:
            ended.append(True)

    client = Client(lambda _: StreamingHttpResponse(endless()))
    request = asyncio.create_task(client.request())
    await asyncio.wait_for(client.first_part.wait(), DEADLINE_S)
    assert len(signals) == 1
    client.leaves.set()
    await request
    assert ended == [True]
    assert len(signals) == 2


async def test_an_error_in_the_content_reaches_the_server(signals):
    async def broken():
        yield "x"
        raise LookupError("broken")

    with pytest.raises(LookupError):
        await Client(lambda _: StreamingHttpResponse(broken())).request()
    assert len(signals) == 2


async def test_a_stopping_server_ends_its_streams(signals):
    async def endless():
        while True:
            yield "x"
            await asyncio.sleep(0)

    client = Client(lambda _: StreamingHttpResponse(endless()))
    request = asyncio.create_task(client.request())
    await asyncio.wait_for(client.first_part.wait(), DEADLINE_S)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    assert len(signals) == 2
