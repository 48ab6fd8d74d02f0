"""Open pages for `bench/soak.py`: what twenty browser tabs ask of the platform, without browsers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

import httpx

VISIT_S = 60.0  # then the tab opens a newer run: page, figures and stream anew
FRAGMENT_S = 10.0  # the tabs' own two seconds would be ten requests a second from people who look at nothing else
FIGURES_S = 1.0  # least time between two fetches of new steps
AGAIN_S = 1.0
KEYS = "critic/score/mean,objective/kl,timing_s/step,bubble/*"


class OpenPages:
    """Tabs of one logged-in browser, in a thread of their own. Each shows a run: its page, new steps as its stream announces
    them, and now and then the rows of the list. A context manager; `newest` is the run that tabs open next."""

    def __init__(self, base_url: str, login: str, tabs: int, newest: int) -> None:
        self.newest, self.counts, self.faults = newest, Counter[str](), Counter[str]()
        self.open_streams = 0
        self._base_url, self._login, self._tabs = base_url, login, tabs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._browse(),), name="open pages")
        self._over = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _browse(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._tabs)
        async with httpx.AsyncClient(base_url=self._base_url, timeout=30, limits=limits) as browser:
            (await browser.get(self._login, follow_redirects=True)).raise_for_status()
            every = [self._repeat(self._visit, browser, n) for n in range(self._tabs)]
            every += [self._repeat(self._look_at_list, browser, n) for n in range(self._tabs)]
            tasks = [asyncio.create_task(each) for each in every]
            await self._over.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, act: Any, browser: httpx.AsyncClient, number: int) -> None:
        """Do it again and again; tabs start one after the other. A failed request is a fault."""
        await asyncio.sleep(number * FRAGMENT_S / self._tabs)
        while True:
            try:
                await act(browser, number)
            except httpx.HTTPError as error:
                self.faults[f"{act.__name__.strip('_')}: {type(error).__name__} {error}"] += 1
                await asyncio.sleep(AGAIN_S)

    async def _visit(self, browser: httpx.AsyncClient, number: int) -> None:
        """Open a run and follow it for a minute."""
        run, last_step, asked_at = self.newest, 0, 0.0
        (await browser.get(f"/runs/{run}")).raise_for_status()
        self.counts["pages"] += 1
        end = time.monotonic() + VISIT_S
        async with browser.stream("GET", "/api/v1/stream", params={"runs": run}) as stream:
            stream.raise_for_status()
            self.open_streams += 1
            lines = aiter(stream.aiter_lines())
            try:
                while True:
                    async with asyncio.timeout(end - time.monotonic()):
                        line = await anext(lines)
                    if not line.startswith("data: "):
                        continue
                    self.counts["events"] += 1
                    if json.loads(line.removeprefix("data: "))["step"] > last_step and time.monotonic() > asked_at + FIGURES_S:
                        last_step, asked_at = await self._figures(browser, run, last_step), time.monotonic()
            except (TimeoutError, StopAsyncIteration):
                return
            finally:
                self.open_streams -= 1

    async def _figures(self, browser: httpx.AsyncClient, run: int, since: int) -> int:
        """Fetch new steps; returns the last."""
        query: dict[str, str | int] = {"keys": KEYS, "x": "step", "max_points": 2000, "since_step": since}
        reply = (await browser.get(f"/api/v1/runs/{run}/metrics", params=query)).raise_for_status()
        self.counts["figures"] += 1
        return int(reply.json()["last_step"] or since)

    async def _look_at_list(self, browser: httpx.AsyncClient, number: int) -> None:
        (await browser.get("/runs", params={"part": "rows"}, headers={"X-Part": "1"})).raise_for_status()
        self.counts["fragments"] += 1
        await asyncio.sleep(FRAGMENT_S)
