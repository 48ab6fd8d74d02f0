"""A small real HTTP server that answers as it was told, one answer a request: what a proxy in trouble does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """One answer. `cut`: so many bytes of the body are sent before the connection is closed; 0 bytes and no status: at once."""

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


HANG_UP = Answer(status=0)


def said(value: Any, status: int = 200, **headers: str) -> Answer:
    """An answer in JSON."""
    told = {name.replace("_", "-"): text for name, text in headers.items()}
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **told})


def summary(state: str = "queued", cursor: int = 1, **more: Any) -> dict[str, Any]:
    """A run's summary, as far as the client reads it."""
    return {
        "id": 7, "name": "n", "state": state, "reason": "", "step": cursor, "total_steps": 9, "cursor": cursor, "project": "p",
        "user": "u", "tags": [], "priority": 50, "latest": {}, "eta_s": None, "url": "/runs/7", **more,
    }  # fmt: skip


@dataclass
class Asked:
    """A request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Server:
    """Answers requests in the order of `answers`; the last one is given for ever. Or `decide(asked)` does."""

    def __init__(self, url: str, answers: list[Answer]) -> None:
        self.url, self.answers = url, answers
        self.asked: list[Asked] = []
        self.decide: Callable[[Asked], Answer] | None = None
        self._lock = threading.Lock()

    def answer(self, asked: Asked) -> Answer:
        """What this request is answered."""
        with self._lock:
            self.asked.append(asked)
            if self.decide is not None:
                return self.decide(asked)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def misbehaving(*answers: Answer) -> Iterator[Server]:
    """A server on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = server.answer(Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.close_connection = True
            if not answer.status:
                return
            self.send_response(answer.status)
            for name, text in {"Content-Length": str(len(answer.body)), "Connection": "close", **answer.headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(answer.body[: answer.cut])

        do_GET = do_POST = do_DELETE = _do

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = Server(f"http://127.0.0.1:{http.server_port}", list(answers))
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
