"""A real reward service on this machine, which a test tells how to behave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RequestBody = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """A reply: status, body and headers; `slowly` sends a byte every so many seconds."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    slowly: float = 0.0


def expected_score(answer: RequestBody) -> float:
    """What an honest judge says: a function of the answer's text alone."""
    words = str(answer["response"]).split()
    return len(set(words)) / (1 + len(words)) - (0.25 if answer["ended"] else 0.0)


def score_response(asked: RequestBody) -> Response:
    """An honest reply."""
    return Response(body=json.dumps({"scores": [expected_score(answer) for answer in asked["answers"]]}).encode())


class RewardServer:
    """Listens on a free port of 127.0.0.1. `behave` gives the reply to a request's JSON and its number, from 1."""

    def __init__(self) -> None:
        self.asked: list[RequestBody] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        self.gone = False
        self.behave: Callable[[RequestBody, int], Response] = lambda asked, number: score_response(asked)
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._reply(self)

            def log_message(self, *_: object) -> None:
                """Nothing: a test's output is its own."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.place = f"127.0.0.1:{self.server.server_address[1]}"
        self.url = f"http://{self.place}/score"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def hold(self) -> None:
        """For `behave`: answer nothing until the test ends or releases it."""
        self.released.wait(60)

    def close(self) -> None:
        """Stop listening and answering; whoever is held is let go."""
        self.gone = True
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def _reply(self, handler: BaseHTTPRequestHandler) -> None:
        asked = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self._lock:
            self.asked.append(asked)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            number = len(self.asked)
        told = self.behave(asked, number)
        if self.gone:
            handler.close_connection = True
            return
        try:
            handler.send_response(told.status)
            for name, value in {"content-length": str(len(told.body)), **told.headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            for place in range(len(told.body)) if told.slowly else ():
                handler.wfile.write(told.body[place : place + 1])
                handler.wfile.flush()
                if self.released.wait(told.slowly):
                    return
            if not told.slowly:
                handler.wfile.write(told.body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # whoever asked has given up, as some tests mean it to


@contextmanager
def serve_rewards() -> Iterator[RewardServer]:
    """A judge that is closed in the end."""
    server = RewardServer()
    try:
        yield server
    finally:
        server.close()
