"""An in-process platform that implements the wire format, and a 40-line engine.

Both exist so that a test can make the network fail at a chosen moment and an engine behave badly. The real platform and the
real engine meet the real worker in tests/end_to_end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from oppo_contract import wire
from oppo_contract.lifeline import Lifeline
from worker.folders import NodeIdentity, WorkerFolder

PATIENCE_S = 120.0  # also on a starved machine, where an agent and its fork servers need half of it to import what they need
ENGINE = Path(__file__).with_name("small_engine.py")


def eventually(holds: Callable[[], Any], what: str = "it", within_s: float = PATIENCE_S) -> Any:
    """The first true value of `holds`, within a deadline that only a hang reaches."""
    deadline = time.monotonic() + within_s
    while True:
        value = holds()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def first_catalogue(bench: Bench) -> Any:
    """The node's first reported catalogue."""

    def told() -> list[Any]:
        return [beat["catalogue"] for beat in bench.platform.node_beats if beat["catalogue"] is not None]

    return eventually(told, "a catalogue")[0]


@dataclass
class Attempt:
    """State of one attempt on the platform."""

    spec: dict[str, Any]
    artifact_url: str
    epoch: int = 1
    claimed: bool = False
    secrets: dict[str, str] = field(default_factory=dict)
    resume_from: wire.CheckpointRef | None = None
    rendezvous: wire.Rendezvous | None = None
    signal: str | None = None
    deadline_s: float = 5.0
    running: bool = False
    fenced: bool = False
    beats: int = 0
    events: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"engine": [], "supervisor": []})
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    device_was_free: bool | None = None

    def kinds(self, kind: str, producer: str = "engine") -> list[dict[str, Any]]:
        """Applied events of one kind."""
        return [event for event in self.events[producer] if event["kind"] == kind]


class SmallPlatform:
    """Node and attempts in memory. `before` may answer first: (status, body), "hang up", or None; see also `problem`."""

    def __init__(self) -> None:
        self.attempts: dict[int, Attempt] = {}
        self.before: Callable[[str, dict[str, Any]], tuple[int, Any] | str | None] = lambda _path, _body: None
        self.lease_s = 900.0
        self.node_beats: list[dict[str, Any]] = []
        self.launchable: list[int] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """What the platform replies; see the table in `oppo_contract.wire`."""
        self.requests.append(path)
        if path == "join":
            return 200, wire.Joined(node_id=1, node_token="node", queue="q", broker_url="redis://127.0.0.1:1/0")
        if path == "heartbeat":
            self.node_beats.append(wire.NodeHeartbeat.model_validate(body).model_dump(mode="json"))
            unclaimed = [wire.LaunchOrder(attempt_id=a, epoch=1) for a in self.launchable if not self.attempts[a].claimed]
            return 200, wire.NodeOrders(unclaimed=unclaimed)
        _, number, call = path.split("/")
        return getattr(self, f"_{call}")(self.attempts[int(number)], body)

    def _claim(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        if attempt.claimed or body["epoch"] != attempt.epoch:
            return 409, wire.Refused(detail="claimed already", reason="already_claimed")
        attempt.claimed = True
        return 200, wire.Claimed(
            attempt_token="attempt", run_id=7, spec=attempt.spec, device_indices=[0], lease_s=self.lease_s,
            artifact_url=attempt.artifact_url, resume_from=attempt.resume_from, secrets=attempt.secrets,
            rendezvous=attempt.rendezvous,
        )  # fmt: skip

    def _heartbeat(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        if attempt.fenced or attempt.outcome is not None:
            return 409, wire.Refused(detail="fenced", reason="lease_lost")
        attempt.beats += 1
        attempt.running |= body["running"]
        return 200, wire.AttemptOrders(lease_s=self.lease_s, signal=attempt.signal, deadline_s=attempt.deadline_s)  # type: ignore[arg-type]

    def _events(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        batch = wire.EventBatch.model_validate(body)
        applied = attempt.events[batch.producer]
        high_water = applied[-1]["seq"] if applied else 0
        if batch.events[0].seq > high_water + 1:
            return 409, wire.Gap(detail="a gap", expected_seq=high_water + 1)
        fresh = [event for event in batch.events if event.seq > high_water]
        assert [event.seq for event in fresh] == list(range(high_water + 1, high_water + 1 + len(fresh)))
        applied += [event.model_dump(mode="json") for event in fresh]
        return 200, wire.Applied(high_water=applied[-1]["seq"])

    def _checkpoints(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        attempt.checkpoints.append(body)
        return 200, wire.Applied()

    def _outcome(self, attempt: Attempt, body: dict[str, Any]) -> tuple[int, Any]:
        if attempt.fenced:
            return 409, wire.Refused(detail="fenced", reason="lease_lost")
        attempt.outcome = wire.Outcome.model_validate(body).model_dump(mode="json")
        attempt.device_was_free = not engines_of(Path(attempt.artifact_url.removeprefix("file://")))
        return 200, wire.Applied()


def problem(status: int) -> tuple[int, dict[str, Any]]:
    """Problem details of the platform with this status."""
    return status, {"title": "no", "status": status, "detail": "no", "errors": [], "request_id": "1"}


def engines_of(path: Path) -> list[psutil.Process]:
    """Running engine processes, and their children, that have a path among their arguments."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            is_guard = any(word.endswith("lifeline.py") for word in line)
            if str(path) in line and not is_guard and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def serve(platform: SmallPlatform, port: int = 0) -> ThreadingHTTPServer:
    """Answer requests in threads until `shutdown`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            path = self.path.removeprefix("/api/worker/v1/")
            with platform.lock:
                early = platform.before(path, body)
                if early == "hang up":
                    platform.answer(path, body)  # done, but the answer is lost
                    self.close_connection = True
                    return
                status, reply = early if early is not None else platform.answer(path, body)
            text = (reply.model_dump_json() if hasattr(reply, "model_dump_json") else json.dumps(reply)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if isinstance(reply, dict) and "request_id" in reply:
                self.send_header("Content-Type", wire.PROBLEM_TYPE)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


@dataclass
class Bench:
    """A platform, a joined node, and attempts to supervise."""

    platform: SmallPlatform
    server: ThreadingHTTPServer
    home: Path
    lifeline: Lifeline
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def folder(self) -> WorkerFolder:
        """The worker's files."""
        return WorkerFolder(self.home)

    def attempt(self, number: int = 1, **engine: Any) -> Attempt:
        """A new attempt; the keywords tell the small engine how to behave."""
        artifacts = self.home / "artifacts" / "runs" / str(number)
        self.platform.attempts[number] = Attempt(spec={"engine": engine}, artifact_url=artifacts.as_uri())
        return self.platform.attempts[number]

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[bytes]:
        """One of the worker's processes."""
        engine = f"{sys.executable} {ENGINE}"
        kept = {key: value for key, value in os.environ.items() if key != "OPPO_LIFELINE_FD"}
        process = subprocess.Popen(
            [sys.executable, "-m", "worker", *arguments], stdin=subprocess.DEVNULL, start_new_session=True,
            env={**self.lifeline.environ(kept), "OPPO_HOME": str(self.home), "OPPO_ENGINE_COMMAND": engine, **environ},
            pass_fds=(self.lifeline.fd,),
        )  # fmt: skip
        self.started.append(process)
        return process

    def supervise(self, number: int = 1, epoch: int = 1, **environ: str) -> subprocess.Popen[bytes]:
        """A supervisor."""
        return self.start("supervise", str(number), str(epoch), **environ)

    def engines(self, number: int = 1) -> list[psutil.Process]:
        """Living engine processes of an attempt."""
        return engines_of(Path(self.platform.attempts[number].artifact_url.removeprefix("file://")))

    def away(self, *, until: Callable[[], Any]) -> None:
        """Nobody listens until the condition holds; then the same platform answers at the same address."""
        port = self.server.server_address[1]
        self.server.shutdown()
        self.server.server_close()
        eventually(until)
        self.server = serve(self.platform, port)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A `Bench`; every process that a test started has ended afterwards."""
    platform = SmallPlatform()
    bench = Bench(platform, serve(platform), tmp_path, Lifeline())
    url = f"http://127.0.0.1:{bench.server.server_address[1]}"
    bench.folder.save_identity(
        NodeIdentity(platform_url=url, name="n", node_id=1, node_token="node", queue="q", broker_url="redis://127.0.0.1:1/0")
    )
    yield bench
    bench.lifeline.close()
    for process in bench.started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    bench.server.shutdown()
    bench.server.server_close()
    eventually(lambda: not any(bench.engines(number) for number in platform.attempts), "every engine to end")


@pytest.fixture(scope="session")
def tools() -> Any:
    """This module's functions, for tests, which cannot import it."""
    return sys.modules[__name__]
