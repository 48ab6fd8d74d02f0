"""A model hub on this machine: the parts of the HTTP API that `huggingface_hub` uses to download a snapshot."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """Repositories by name, each its commits in order as {file: content}; a commit's hash is made of its number."""

    repositories: dict[str, list[dict[str, bytes]]]
    url: str = ""
    asked: list[str] = field(default_factory=list)
    held: threading.Event | None = None  # the content of files is sent after it is set

    @staticmethod
    def commit(number: int) -> str:
        """The hash of a repository's commit, numbered from 0."""
        return hashlib.sha1(str(number).encode()).hexdigest()

    def files(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files that a revision (`main` or a hash) names."""
        commits = {self.commit(number): files for number, files in enumerate(self.repositories.get(name, []))}
        chosen = list(commits)[-1] if commits and revision in ("main", "") else revision
        return (chosen, commits[chosen]) if chosen in commits else None


def _answer(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    parts = path.partition("?")[0].strip("/").split("/")
    api = parts[:2] == ["api", "models"]
    name = "/".join(parts[2:4] if api else parts[:2])
    rest = parts[4:] if api else parts[2:]
    found = hub.files(name, rest[1] if len(rest) > 1 else "main")
    if found is None:
        code = "RevisionNotFound" if name in hub.repositories else "RepoNotFound"
        return 404, {"X-Error-Code": code, "X-Error-Message": f"no {name} here"}, b"{}"
    commit, files = found
    if api and rest[:1] == ["tree"]:
        listed = [{"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for n, c in files.items()]
        return 200, {}, json.dumps(listed).encode()
    if api:
        told: dict[str, Any] = {"id": name, "modelId": name, "sha": commit, "siblings": [{"rfilename": n} for n in files]}
        return 200, {}, json.dumps(told).encode()
    content = files.get("/".join(rest[2:]))
    if content is None:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Serve the hub on a free port, `hub.url`, until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(body=True)

        def do_HEAD(self) -> None:
            self._reply(body=False)

        def _reply(self, body: bool) -> None:
            hub.asked.append(self.path)
            status, headers, content = _answer(hub, self.path)
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                if hub.held is not None and "/resolve/" in self.path:
                    hub.held.wait()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: a test's output is its own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
