"""The two drivers of flows, over httpx: everything that waits or touches the network is here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing, closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx

from oppo_client.config import Config
from oppo_client.errors import DownloadError, OppoError, Unreachable
from oppo_client.sans_io import (
    PAGES,
    Batch,
    Effect,
    Feed,
    Flow,
    Listen,
    Pause,
    Reply,
    Request,
    Save,
    Steps,
    not_the_platform,
    refusal,
)
from oppo_client.sse import EventReader, ServerEvent

T = TypeVar("T")

ANSWERS_WITHIN_S = 60.0
CONNECTS_WITHIN_S = 10.0
# The platform says something at least every 15 s; a stream that is silent for longer is dead, or held back by a proxy.
STREAM_SILENT_S = 40.0
PARTIAL, WHOLE = 206, 200
EVENTS = "text/event-stream"
PIECE = 1024 * 1024


def settings_of(config: Config, agent: str) -> dict[str, Any]:
    """What both of httpx's clients are made with. Redirections are not followed: the token is for one address."""
    return {
        "base_url": f"{config.url}/api/v1/",
        "headers": {"Authorization": f"Bearer {config.token}", "User-Agent": agent, "Accept": "application/json"},
        "timeout": httpx.Timeout(ANSWERS_WITHIN_S, connect=CONNECTS_WITHIN_S),
        "follow_redirects": False,
    }


@contextmanager
def _told(url: httpx.URL) -> Iterator[None]:
    """Turn httpx's errors of transport into ours, in words."""
    try:
        yield
    except httpx.TransportError as error:
        said = str(error) or type(error).__name__
        raise Unreachable(f"{url.scheme}://{url.netloc.decode()} cannot be reached: {said}") from error
    except (httpx.DecodingError, httpx.StreamError) as error:
        raise Unreachable(f"{url.scheme}://{url.netloc.decode()} closed the connection: {error}") from error
    except UnicodeError as error:  # a name that no name server can be asked for
        raise Unreachable(f"{url.scheme}://{url.netloc.decode()} cannot be reached: {error}") from error
    except OSError as error:  # the network's are httpx's; this one is a file's
        raise DownloadError(f"{error.filename or 'The download'} cannot be written: {error.strerror}.") from error


def _as_httpx(http: httpx.Client | httpx.AsyncClient, request: Request, **options: Any) -> httpx.Request:
    headers = dict(request.headers)
    return http.build_request(
        request.method, request.path, params=dict(request.params), content=request.body, headers=headers, **options
    )


def _for_a_stream(http: httpx.Client | httpx.AsyncClient, request: Request) -> httpx.Request:
    silent = httpx.Timeout(STREAM_SILENT_S, connect=CONNECTS_WITHIN_S)
    return _as_httpx(http, request, timeout=silent)


def _reply(answer: httpx.Response, content: bytes = b"") -> Reply:
    return Reply(answer.status_code, answer.headers, content, str(answer.url.copy_with(query=None)))


def _no_stream(reply: Reply) -> OppoError:
    """The exception for a reply that is no stream of events."""
    if reply.status != WHOLE:
        return refusal(reply)
    return not_the_platform(reply, f"it is {reply.kind or 'of no kind'}, not {EVENTS}")


def _file_for(answer: httpx.Response, path: Path) -> BinaryIO | None:
    """Where the reply's content goes; None when it is no content of a file."""
    if answer.status_code not in (PARTIAL, WHOLE) or _reply(answer).kind in PAGES:
        return None
    return path.open("ab" if answer.status_code == PARTIAL else "wb", buffering=PIECE)


class Channel:
    """What one flow has open: at most a stream of events."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._answer: httpx.Response | None = None
        self._lines: Iterator[str] = iter(())
        self._reader = EventReader()

    def do(self, effect: Effect) -> Any:
        """Do it. Raises `OppoError`."""
        if isinstance(effect, Pause):
            time.sleep(effect.seconds)
            return None
        with _told(self._http.base_url):
            if isinstance(effect, Listen):
                return self._next_event(effect.request)
            return self._save(effect) if isinstance(effect, Save) else self._send(effect)

    def _send(self, request: Request) -> Reply:
        answer = self._http.send(_as_httpx(self._http, request))
        return _reply(answer, answer.content)

    def _save(self, save: Save) -> Reply:
        answer = self._http.send(_as_httpx(self._http, save.request), stream=True)
        with closing(answer):
            file = _file_for(answer, save.path)
            if file is None:
                return _reply(answer, answer.read())
            with file:
                for piece in answer.iter_raw():  # as they come: larger pieces would be lost with the connection
                    file.write(piece)
        return _reply(answer)

    def _next_event(self, request: Request) -> ServerEvent | None:
        try:
            if self._answer is None:
                self._open(request)
            for line in self._lines:
                if (event := self._reader.read(line)) is not None:
                    return event
        except (OppoError, httpx.HTTPError):
            self.close()
            raise
        self.close()
        return None

    def _open(self, request: Request) -> None:
        answer = self._answer = self._http.send(_for_a_stream(self._http, request), stream=True)
        if answer.status_code != WHOLE or _reply(answer).kind != EVENTS:
            raise _no_stream(_reply(answer, answer.read()))
        self._lines, self._reader = answer.iter_lines(), EventReader()

    def close(self) -> None:
        """End the stream, if one is open."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()


class Transport:
    """Drives flows and blocks meanwhile. May be used by several threads."""

    def __init__(self, config: Config, agent: str) -> None:
        self._http = httpx.Client(**settings_of(config, agent))

    def perform(self, flow: Flow[T]) -> T:
        """The flow's result. Raises `OppoError`."""
        steps = Steps(flow)
        for _ in self._drive(steps):
            raise TypeError("a flow that yields items is iterated over, not performed")
        return steps.result

    def iterate(self, feed: Feed[T]) -> Iterator[T]:
        """The feed's items, each fetched when it is asked for. Raises `OppoError`."""
        steps = Steps(feed)
        with closing(self._drive(steps)) as batches:
            for batch in batches:
                yield from batch.items

    def _drive(self, steps: Steps[Any]) -> Generator[Batch[Any], None, None]:
        with closing(steps), closing(Channel(self._http)) as channel:
            while (effect := steps.next()) is not None:
                if isinstance(effect, Batch):
                    yield effect
                    continue
                try:
                    steps.answer(channel.do(effect))
                except OppoError as error:
                    steps.fail(error)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()


class AsyncChannel:
    """As `Channel`, in an event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._answer: httpx.Response | None = None
        self._lines: AsyncIterator[str] | None = None
        self._reader = EventReader()

    async def do(self, effect: Effect) -> Any:
        """Do it. Raises `OppoError`."""
        if isinstance(effect, Pause):
            await asyncio.sleep(effect.seconds)
            return None
        with _told(self._http.base_url):
            if isinstance(effect, Listen):
                return await self._next_event(effect.request)
            return await (self._save(effect) if isinstance(effect, Save) else self._send(effect))

    async def _send(self, request: Request) -> Reply:
        answer = await self._http.send(_as_httpx(self._http, request))
        return _reply(answer, answer.content)

    async def _save(self, save: Save) -> Reply:
        answer = await self._http.send(_as_httpx(self._http, save.request), stream=True)
        async with aclosing(answer):
            file = _file_for(answer, save.path)
            if file is None:
                return _reply(answer, await answer.aread())
            with file:
                async for piece in answer.aiter_raw():
                    file.write(piece)  # mostly into the file's buffer
        return _reply(answer)

    async def _next_event(self, request: Request) -> ServerEvent | None:
        try:
            lines = self._lines if self._answer is not None and self._lines is not None else await self._open(request)
            async for line in lines:
                if (event := self._reader.read(line)) is not None:
                    return event
        except (OppoError, httpx.HTTPError):
            await self.aclose()
            raise
        await self.aclose()
        return None

    async def _open(self, request: Request) -> AsyncIterator[str]:
        answer = self._answer = await self._http.send(_for_a_stream(self._http, request), stream=True)
        if answer.status_code != WHOLE or _reply(answer).kind != EVENTS:
            raise _no_stream(_reply(answer, await answer.aread()))
        self._lines, self._reader = answer.aiter_lines(), EventReader()
        return self._lines

    async def aclose(self) -> None:
        """End the stream, if one is open."""
        answer, self._answer, self._lines = self._answer, None, None
        if answer is not None:
            await answer.aclose()


class AsyncTransport:
    """Drives flows in an asyncio event loop, which goes on meanwhile."""

    def __init__(self, config: Config, agent: str) -> None:
        self._http = httpx.AsyncClient(**settings_of(config, agent))

    async def perform(self, flow: Flow[T]) -> T:
        """The flow's result. Raises `OppoError`."""
        steps = Steps(flow)
        async with aclosing(self._drive(steps)) as batches:
            async for _ in batches:
                raise TypeError("a flow that yields items is iterated over, not performed")
        return steps.result

    async def iterate(self, feed: Feed[T]) -> AsyncIterator[T]:
        """The feed's items, each fetched when it is asked for. Raises `OppoError`."""
        async with aclosing(self._drive(Steps(feed))) as batches:
            async for batch in batches:
                for item in batch.items:
                    yield item

    async def _drive(self, steps: Steps[Any]) -> AsyncGenerator[Batch[Any], None]:
        channel = AsyncChannel(self._http)
        with closing(steps):
            async with aclosing(channel):
                while (effect := steps.next()) is not None:
                    if isinstance(effect, Batch):
                        yield effect
                        continue
                    try:
                        steps.answer(await channel.do(effect))
                    except OppoError as error:
                        steps.fail(error)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()


def _version() -> str:
    try:
        return version("oppo-platform")
    except PackageNotFoundError:  # run from a checkout
        return "0"


AGENT = f"oppo-client/{_version()}"
