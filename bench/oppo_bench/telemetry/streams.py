"""Many open pages, for `oppo bench telemetry`: memory of 500 live streams, and their effect on the time to open a page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from oppo_bench.telemetry import load as load
from oppo_cli.home import Failure

if TYPE_CHECKING:
    import httpx
    import psutil

    from oppo_bench.document import Result

STREAMS, WATCHED = 500, 50
STEP_S = 2.0  # between two steps of a run; 25 steps a second in all
OPENED_AT_ONCE = 20
PAGE_PAUSE_S = 0.05
MEASURED_S, QUICK_S = 30.0, 8.0
OPENS_WITHIN_S = 60.0
TOO_MANY = 429
REWARD = "critic/score/mean"


@dataclass(slots=True)
class Heard:
    """What the streams received: when each run first reported each step, and the delay since the step was sent."""

    written_at_of: dict[tuple[int, int], float] = field(default_factory=dict)
    lag_ms: list[float] = field(default_factory=list)
    opened: int = 0
    sent_away: int = 0

    def take(self, summary: dict[str, Any]) -> None:
        """Process a received summary."""
        written_at = self.written_at_of.get((summary["id"], summary["step"]))
        if written_at is not None:
            self.lag_ms.append(1e3 * (time.perf_counter() - written_at))


@dataclass(frozen=True, slots=True)
class Scene:
    """Platform, reader, and the runs with (attempt, token) of their supervisors."""

    base_url: str
    token: str
    login: str
    workers: dict[int, tuple[int, str]]
    seconds: float


def open_streams(base_url: str, owner: load.Tenant, web_pid: int, scale: int) -> list[Result]:
    """500 streams over 50 runs, each with a step every two seconds: memory of the web process, and the time to open a page."""
    import psutil

    from oppo_bench.document import Result
    from oppo_platform.accounts.services import create_login_link

    web = psutil.Process(web_pid)
    workers = {run.pk: load.attempt_token(run) for run in load.runs(owner, WATCHED, [REWARD], "running")}
    login = f"/login-link/{create_login_link(owner.user).rpartition('/')[2]}"
    scene = Scene(base_url, owner.token, login, workers, QUICK_S if scale > 1 else MEASURED_S)
    before = web.memory_info().rss
    pages, heard, most = asyncio.run(_meanwhile(scene, web))
    return [
        Result.of("streams_500_rss_mb", "MB", [most / 1e6]), Result.of("streams_0_rss_mb", "MB", [before / 1e6]),
        Result.tail("streams_500_page_ms/p95", "ms", pages), Result.of("streams_500_page_ms", "ms", pages),
        Result.tail("streams_500_lag_ms/p95", "ms", heard.lag_ms), Result.of("streams_500_lag_ms", "ms", heard.lag_ms),
        Result.of("streams_500_sent_away", "batches", [heard.sent_away]),
    ]  # fmt: skip


async def _meanwhile(scene: Scene, web: psutil.Process) -> tuple[list[float], Heard, int]:
    """(ms per page, steps received, peak resident bytes) while all streams are open and all runs train."""
    import httpx

    heard, pages, most = Heard(), [], 0
    async with (
        _streams(scene, heard),
        httpx.AsyncClient(base_url=scene.base_url, timeout=60) as supervisors,
        httpx.AsyncClient(base_url=scene.base_url, timeout=60) as reader,
        asyncio.TaskGroup() as group,
    ):
        (await reader.get(scene.login, follow_redirects=True)).raise_for_status()
        end = time.perf_counter() + scene.seconds
        for n, run_id in enumerate(scene.workers):
            group.create_task(_train(supervisors, heard, scene, run_id, n * STEP_S / WATCHED, end))
        for run_id in cycle(scene.workers):
            start = time.perf_counter()
            (await reader.get(f"/runs/{run_id}")).raise_for_status()
            pages.append(1e3 * (time.perf_counter() - start))
            most = max(most, web.memory_info().rss)
            if time.perf_counter() > end:
                break
            await asyncio.sleep(PAGE_PAUSE_S)
    return pages, heard, most


async def _train(client: httpx.AsyncClient, heard: Heard, scene: Scene, run_id: int, wait_s: float, end: float) -> None:
    """A run's supervisor: sends a step every two seconds."""
    attempt, token = scene.workers[run_id]
    await asyncio.sleep(wait_s)
    step = 1
    while time.perf_counter() < end:
        due = time.perf_counter() + STEP_S
        step += 1
        event = {
            "kind": "step", "producer": "engine", "seq": step - 1, "time": time.time(), "step": step, "elapsed_s": float(step),
            "generated_tokens": step * 4096, "device_seconds": float(step), "metrics": {REWARD: 0.1 * step},
        }  # fmt: skip
        heard.written_at_of[run_id, step] = time.perf_counter()
        body = json.dumps({"producer": "engine", "events": [event]})
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        address = f"/api/worker/v1/attempts/{attempt}/events"
        while (answer := await client.post(address, content=body, headers=headers)).status_code == TOO_MANY:
            heard.sent_away += 1
            await asyncio.sleep(float(answer.headers["Retry-After"]))
        answer.raise_for_status()
        await asyncio.sleep(max(0.0, due - time.perf_counter()))


@asynccontextmanager
async def _streams(scene: Scene, heard: Heard) -> AsyncIterator[None]:
    """All streams, open; raw sockets, because a client library's own work would be measured otherwise."""
    place, gate = urlsplit(scene.base_url), asyncio.Semaphore(OPENED_AT_ONCE)
    watched = islice(cycle(scene.workers), STREAMS)
    listeners = [
        asyncio.create_task(_listen(place.hostname or "", place.port or 80, scene.token, run_id, heard, gate))
        for run_id in watched
    ]
    try:
        deadline = time.perf_counter() + OPENS_WITHIN_S
        while heard.opened < STREAMS:
            if time.perf_counter() > deadline:
                raise Failure(f"Only {heard.opened} of {STREAMS} streams opened within {OPENS_WITHIN_S:.0f} s.")
            await asyncio.sleep(0.05)
        yield
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)


async def _listen(host: str, port: int, token: str, run_id: int, heard: Heard, gate: asyncio.Semaphore) -> None:
    async with gate:
        reader, writer = await asyncio.open_connection(host, port)
        asked = f"GET /api/v1/stream?runs={run_id} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n\r\n"
        writer.write(asked.encode())
        await reader.readuntil(b"event: run\n")
        heard.opened += 1
    try:
        while line := await reader.readline():
            if line.startswith(b"data: "):
                heard.take(json.loads(line.removeprefix(b"data: ")))
    finally:
        writer.close()
