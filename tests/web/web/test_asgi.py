"""The web process's handler: one thread serves a request from its first signal to its last; streams end with their client."""

from __future__ import annotations

import asyncio
import threading

import pytest
from asgiref.sync import sync_to_async
from django.core.signals import request_finished, request_started
from django.db import connection
from django.http import FileResponse, HttpResponse, StreamingHttpResponse

from oppo_platform.accounts.models import User
from oppo_platform.asgi import OneThread

pytestmark = [pytest.mark.asyncio, pytest.mark.django_db(transaction=True)]
DEADLINE_S = 20


class Client:
    """One request of an ASGI server, and what it received."""

    def __init__(self, view):
        self.handler, self.messages, self.leaves, self.threads = OneThread(), [], asyncio.Event(), set()
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
    """A request's first and last signal, with their threads."""
    seen = []

    def started(**_):
        seen.append(("started", threading.current_thread().name))

    def finished(**_):
        seen.append(("finished", threading.current_thread().name))

    request_started.connect(started)
    request_finished.connect(finished)
    yield seen
    request_started.disconnect(started)
    request_finished.disconnect(finished)


def connections_in_use() -> int:
    stats = connection.pool.get_stats()
    return stats["pool_size"] - stats["pool_available"]


async def test_a_request_is_served_by_one_thread_and_few_serve_many(signals):
    def view(_):
        signals.append(("view", threading.current_thread().name))
        return HttpResponse(User.objects.count())

    client, before = Client(view), connections_in_use()
    for _ in range(20):
        signals.clear()
        client.messages.clear()
        assert await client.request() == b"0"
        assert [name for name, _ in signals] == ["started", "view", "finished"]
        client.threads.add(*{thread for _, thread in signals})
    assert len(client.threads) < 5
    assert connections_in_use() == before


async def test_an_error_outside_the_middleware_gives_the_connection_back(signals):
    def view(_):
        User.objects.exists()
        raise LookupError

    before = connections_in_use()
    with pytest.raises(LookupError):
        await Client(view).request()
    assert connections_in_use() == before


async def test_files_are_sent_in_large_pieces(signals, tmp_path):
    file = tmp_path / "large"
    file.write_bytes(b"x" * 1_000_000)
    client = Client(lambda _: FileResponse(file.open("rb")))
    assert len(await client.request()) == 1_000_000
    assert len(client.messages) < 20


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


async def begin_endless_stream():
    """A client that has received a part of a stream, its request, and a list that is not empty once the content has ended."""
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
    return client, request, ended


async def test_a_stream_ends_when_its_client_leaves(signals):
    client, request, ended = await begin_endless_stream()
    assert len(signals) == 1
    client.leaves.set()
    await request
    assert ended == [True]
    assert len(signals) == 2


async def test_an_error_in_the_content_reaches_the_server(signals):
    async def broken():
        yield "x"
        raise LookupError("broken")

    client = Client(lambda _: StreamingHttpResponse(broken()))
    with pytest.raises(LookupError):
        await client.request()
    assert client.messages[-1]["more_body"]  # the client sees that it is not whole
    assert len(signals) == 2


async def test_a_stopping_server_ends_its_streams(signals):
    _, request, ended = await begin_endless_stream()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ended == [True]
    assert len(signals) == 2
