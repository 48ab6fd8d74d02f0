"""Calls as generators that do no input or output themselves, so that each is written once for the sync and the async client.

A `Flow` yields what it wants done (`Request`, `Pause`, `Listen`, `Save`), is sent what came of it, and returns its result. A
`Feed` yields, between these, a `Batch` of items for whoever iterates. A driver (`transport`) does the effects. What fails on the
way is thrown in: a flow may catch `Unreachable` or `ApiError` and go on.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from oppo_client.errors import NotThePlatform, OppoError, Unreachable, error_of
from oppo_client.retry import Retries, retry_after_s
from oppo_client.validation import Shape, fault

# What a proxy's or a login's page is, and no reply of the platform.
PAGES = ("text/html", "application/xhtml+xml")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request to `/api/v1/{path}`. The same object is sent again when it is retried, key and body included."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back from `url`, whatever its status. `headers` are looked up in any case."""

    status: int
    headers: Mapping[str, str]
    content: bytes = field(repr=False, default=b"")
    url: str = ""

    @property
    def ok(self) -> bool:
        """Whether it is a success."""
        return 200 <= self.status < 300

    @property
    def kind(self) -> str:
        """Its media type, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Listen:
    """The next server-sent event: of the stream that is open, or of this request's when none is. None: the stream has ended."""

    request: Request


@dataclass(frozen=True, slots=True)
class Save:
    """Send the request and write the content of its reply to a file: behind what is there when the reply is partial (206).

    Answered with a `Reply`, whose content is empty when it was written, and otherwise tells what was wrong.
    """

    request: Request
    path: Path


@dataclass(frozen=True, slots=True)
class Batch(Generic[T_co]):
    """Items for whoever iterates over a feed."""

    items: Sequence[T_co]


Effect: TypeAlias = Request | Pause | Listen | Save
Flow: TypeAlias = Generator[Effect, Any, T]
Feed: TypeAlias = Generator[Effect | Batch[T], Any, None]


class Steps(Generic[T]):
    """Advances a flow or a feed by one effect at a time; what both drivers have in common."""

    result: T

    def __init__(self, flow: Generator[Effect | Batch[Any], Any, T]) -> None:
        self._flow = flow
        self._answer: Any = None
        self._error: OppoError | None = None

    def next(self) -> Effect | Batch[Any] | None:
        """What is to be done next; None at the end, and then `result` is there."""
        answer, error, self._answer, self._error = self._answer, self._error, None, None
        try:
            return self._flow.send(answer) if error is None else self._flow.throw(error)
        except StopIteration as done:
            self.result = done.value
            return None

    def answer(self, value: Any) -> None:
        """What came of the effect."""
        self._answer = value

    def fail(self, error: OppoError) -> None:
        """The effect failed."""
        self._error = error

    def close(self) -> None:
        """Let the flow clean up; harmless at its end."""
        self._flow.close()


def get(path: str, **params: Any) -> Request:
    """A `GET`; parameters that are None are left out, truth values and lists written as the API reads them."""
    return Request("GET", path, {name: _word(value) for name, value in params.items() if value is not None})


def post(path: str, body: Mapping[str, Any] | None = None, *, changes: bool = True) -> Request:
    """A `POST` of JSON. Unless it changes nothing it carries a key, by which the platform does it once however often it comes."""
    headers = {"Content-Type": "application/json"} | (_key() if changes else {})
    return Request("POST", path, {}, json.dumps(body or {}, allow_nan=False).encode(), headers)


def delete(path: str) -> Request:
    """A `DELETE`, with a key as `post`."""
    return Request("DELETE", path, {}, None, _key())


def call(request: Request, retries: Retries) -> Flow[Reply]:
    """A successful reply, after as many repetitions as it takes. Raises `Unreachable` or an `ApiError`."""
    tries = 0
    while True:
        tries += 1
        try:
            reply: Reply = yield request
        except Unreachable:
            if tries > retries.most:
                raise
            yield Pause(retries.pause_s(tries))
            continue
        if reply.ok:
            if reply.kind in PAGES:
                raise not_the_platform(reply, f"it is {reply.kind}")
            return reply
        pause_s = retries.pause_after(reply.status, reply.headers, tries)
        if pause_s is None or tries > retries.most:
            raise refusal(reply)
        yield Pause(pause_s)


def asked(request: Request, retries: Retries, shape: Shape = dict) -> Flow[Any]:
    """As `call`, and the reply's JSON, None without content. Raises `NotThePlatform` when it has another shape (`shapes`)."""
    reply = yield from call(request, retries)
    return told(reply, reply.content or b"null", shape)


def told(reply: Reply, text: bytes | str, shape: Shape) -> Any:
    """JSON that came with a reply. Raises `NotThePlatform` for anything else, and when it has another shape."""
    try:
        found = json.loads(text)
    except ValueError:
        raise not_the_platform(reply, "it is no JSON") from None
    if (wrong := fault(found, shape)) is not None:
        raise not_the_platform(reply, wrong)
    return found


def not_the_platform(reply: Reply, wrong: str) -> NotThePlatform:
    """The exception for a success that is not what the platform answers."""
    text = f"{reply.url} does not respond like the platform ({wrong}); check the URL"
    return NotThePlatform(reply.status, "Not the platform", text)


def refusal(reply: Reply) -> OppoError:
    """The exception for a reply that is no success."""
    return error_of(reply.status, reply.headers, reply.content, retry_after_s(reply.headers))


def _key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid.uuid4())}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
