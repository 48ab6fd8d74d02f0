"""HTTP session with one platform, over httpx: requests with retries, file downloads, and the SSE stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from oppo_client.config import Config
from oppo_client.errors import DownloadError, OppoError, Unreachable
from oppo_client.messages import HTML_TYPES, Reply, Request, error_reply, get, not_the_platform, parse_json
from oppo_client.retry import Retries
from oppo_client.sse import EventReader, ServerEvent
from oppo_client.validation import Shape

REPLY_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
# The platform sends a comment at least every 15 s.
STREAM_TIMEOUT_S = 40.0
OK, PARTIAL_CONTENT = 200, 206
EVENT_STREAM = "text/event-stream"
BUFFER_BYTES = 1024 * 1024


class Session:
    """Sends requests to one platform. Thread-safe."""

    def __init__(self, config: Config, retries: Retries) -> None:
        self.url, self.retries = config.url, retries
        self._http = httpx.Client(
            base_url=f"{config.url}/api/v1/",
            headers={"Authorization": f"Bearer {config.token}", "User-Agent": user_agent(), "Accept": "application/json"},
            timeout=httpx.Timeout(REPLY_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            follow_redirects=False,  # the token is for one address
        )

    def call(self, request: Request) -> Reply:
        """A successful reply, after retries. Raises `Unreachable` or an `ApiError`."""
        tries = 0
        while True:
            tries += 1
            try:
                reply = self.send(request)
            except Unreachable:
                if tries > self.retries.most:
                    raise
                self.sleep(self.retries.pause_s(tries))
                continue
            if reply.ok:
                if reply.media_type in HTML_TYPES:
                    raise not_the_platform(reply, f"it is {reply.media_type}")
                return reply
            pause_s = self.retries.pause_after(reply.status, reply.headers, tries)
            if pause_s is None or tries > self.retries.most:
                raise error_reply(reply)
            self.sleep(pause_s)

    def json(self, request: Request, shape: Shape = dict) -> dict[str, Any]:
        """The reply's JSON object. Raises as `call`, and `NotThePlatform` if it does not match `shape`."""
        reply = self.call(request)
        return parse_json(reply, reply.content or b"null", shape)

    def text(self, path: str, **params: Any) -> str:
        """The text of a `GET`. Raises as `call`."""
        return self.call(get(path, **params)).content.decode("utf-8", "replace")

    def send(self, request: Request) -> Reply:
        """Send a request once. Raises `Unreachable`."""
        with _translate_errors(self._http.base_url):
            response = self._http.send(_build_request(self._http, request))
            return _to_reply(response, response.content)

    def save(self, request: Request, path: Path) -> Reply:
        """Send a request once and write the content to a file; appends to the file if the reply is partial (206).

        Returns the reply: without content if the file was written, otherwise with it. Raises `Unreachable` or `DownloadError`.
        """
        with _translate_errors(self._http.base_url):
            response = self._http.send(_build_request(self._http, request), stream=True)
            with closing(response):
                reply = _to_reply(response)
                if reply.status not in (PARTIAL_CONTENT, OK) or reply.media_type in HTML_TYPES:
                    return _to_reply(response, response.read())
                with path.open("ab" if reply.status == PARTIAL_CONTENT else "wb", buffering=BUFFER_BYTES) as file:
                    for chunk in response.iter_raw():  # a larger chunk_size would lose more when the connection breaks
                        file.write(chunk)
            return reply

    def events(self) -> EventStream:
        """A server-sent event stream, not yet open; the caller closes it."""
        return EventStream(self._http)

    def sleep(self, seconds: float) -> None:
        """Block for some seconds."""
        time.sleep(seconds)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()


class EventStream:
    """Server-sent events (SSE). `next` opens the stream if it is closed."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._lines: Iterator[str] = iter(())
        self._reader = EventReader()

    def next(self, request: Request) -> ServerEvent | None:
        """The next event; None at the end. `request` is sent only to open the stream. Raises `Unreachable` or an `ApiError`."""
        try:
            with _translate_errors(self._http.base_url):
                if self._response is None:
                    self._open(request)
                for line in self._lines:
                    if (event := self._reader.read(line)) is not None:
                        return event
        except OppoError:
            self.close()
            raise
        self.close()
        return None

    def _open(self, request: Request) -> None:
        timeout = httpx.Timeout(STREAM_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        response = self._response = self._http.send(_build_request(self._http, request, timeout=timeout), stream=True)
        reply = _to_reply(response)
        if reply.status != OK:
            raise error_reply(_to_reply(response, response.read()))
        if reply.media_type != EVENT_STREAM:
            raise not_the_platform(reply, f"it is {reply.media_type or 'without a media type'}, not {EVENT_STREAM}")
        self._lines, self._reader = response.iter_lines(), EventReader()

    def close(self) -> None:
        """Close the stream if it is open."""
        response, self._response = self._response, None
        if response is not None:
            response.close()


@contextmanager
def _translate_errors(url: httpx.URL) -> Iterator[None]:
    """Raise httpx's transport errors as `Unreachable`, and file errors as `DownloadError`."""
    address = f"{url.scheme}://{url.netloc.decode()}"
    try:
        yield
    except httpx.TransportError as error:
        raise Unreachable(f"{address} cannot be reached: {str(error) or type(error).__name__}") from error
    except (httpx.DecodingError, httpx.StreamError) as error:
        raise Unreachable(f"{address} closed the connection: {error}") from error
    except UnicodeError as error:  # a host name that cannot be encoded for DNS
        raise Unreachable(f"{address} cannot be reached: {error}") from error
    except OSError as error:  # a file's: network errors are httpx's
        raise DownloadError(f"{error.filename or 'The download'} cannot be written: {error.strerror}.") from error


def _build_request(http: httpx.Client, request: Request, **options: Any) -> httpx.Request:
    headers = dict(request.headers)
    return http.build_request(
        request.method, request.path, params=dict(request.params), content=request.body, headers=headers, **options
    )


def _to_reply(response: httpx.Response, content: bytes = b"") -> Reply:
    return Reply(response.status_code, response.headers, content, str(response.url.copy_with(query=None)))


def user_agent() -> str:
    """`oppo-client/VERSION`; version 0 in a checkout that is not installed."""
    try:
        return f"oppo-client/{version('oppo-platform')}"
    except PackageNotFoundError:
        return "oppo-client/0"
