"""The same client for asyncio: every call of `Client`, `Run` and `Checkpoint`, awaited; listings with `async for`.

What a call does stands once, in `operations`, `submitting`, `feeds`, `series` and `downloading`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

from oppo_client import downloading, operations, optional_deps, series, spec_source
from oppo_client.checkpoint import CheckpointFacts
from oppo_client.comparison import Comparison
from oppo_client.config import load_config
from oppo_client.errors import RunFailed
from oppo_client.pagination import changes
from oppo_client.plots import line_plot
from oppo_client.progress import view
from oppo_client.records import LogLine, Sample
from oppo_client.retry import Retries
from oppo_client.run_base import REWARD, RunFacts
from oppo_client.sans_io import Feed, Flow, asked, get, post
from oppo_client.tables import framed
from oppo_client.timeline import Timeline
from oppo_client.transport import AGENT, AsyncTransport

T = TypeVar("T")


class AsyncClient:
    """As `Client`, awaited. It belongs to the event loop in which its first call is made."""

    def __init__(self, url: str | None = None, token: str | None = None, *, retries: Retries | None = None) -> None:
        config = load_config(url, token)
        self.url = config.url
        self.retries = retries or Retries()
        self._transport = AsyncTransport(config, AGENT)

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.url}>"

    async def perform(self, flow: Flow[T]) -> T:
        """Drive a call to its end."""
        return await self._transport.perform(flow)

    def iterate(self, feed: Feed[T]) -> AsyncIterator[T]:
        """Drive a listing; items are fetched as they are asked for."""
        return self._transport.iterate(feed)

    async def me(self) -> dict[str, Any]:
        """Who the token acts as, and what it may."""
        return await self.perform(operations.me(self.retries))

    async def submit(
        self,
        spec: spec_source.Source | None = None,
        *,
        yaml: str | None = None,
        project: str | int | None = None,
        overrides: spec_source.Changes | None = None,
    ) -> AsyncRun:
        """Queue a run; as `Client.submit`."""
        body = spec_source.body_of(spec, yaml, project)
        return AsyncRun(self, await self.perform(spec_source.submit(body, overrides, self.retries)))

    async def validate(
        self,
        spec: spec_source.Source | None = None,
        *,
        yaml: str | None = None,
        project: str | int | None = None,
        overrides: spec_source.Changes | None = None,
    ) -> dict[str, Any]:
        """What `submit` would say; as `Client.validate`."""
        return await self.perform(spec_source.validate(spec_source.body_of(spec, yaml, project), overrides, self.retries))

    async def get(self, run_id: int) -> AsyncRun:
        """A run by its number. Raises `NotFound`."""
        return AsyncRun(self, await self.perform(operations.show(run_id, self.retries)))

    async def runs(
        self, filter: str = "", sort: str = "", *, project: str | int = "", state: str | Iterable[str] = ""
    ) -> AsyncIterator[AsyncRun]:
        """Runs of your teams, newest first, page by page; as `Client.runs`."""
        async for told in self.iterate(operations.runs(filter, sort, str(project), state, self.retries)):
            yield AsyncRun(self, told)

    async def queue(self, frame: bool | None = None) -> Any:
        """Your waiting runs in their order; as `Client.queue`."""
        return framed(await self.perform(operations.queue(self.retries)), frame)

    async def cluster(self) -> list[dict[str, Any]]:
        """The nodes and their devices, as `GET cluster` has them."""
        return await self.perform(operations.items("cluster", self.retries))

    async def quotas(self) -> list[dict[str, Any]]:
        """Pools with what your teams own and borrow of each, as `GET quotas` has them."""
        return await self.perform(operations.items("quotas", self.retries))

    async def teams(self) -> list[dict[str, Any]]:
        """Your teams: `{"id", "name", "role", "projects"}`."""
        return await self.perform(operations.items("teams", self.retries))

    def alerts(
        self, *, open: bool = False, team: int | None = None, run: RunFacts | int | None = None, condition: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Alerts of your teams' runs, newest first; `open` leaves out those that are over (docs/alerts.md)."""
        return self.iterate(operations.alerts(open, team, run, condition, self.retries))

    async def acknowledge(self, alert: int) -> dict[str, Any]:
        """Say that you take care of an alert; the alert. Raises `Forbidden` for viewers."""
        return await self.perform(asked(post(f"alerts/{int(alert)}/acknowledge"), self.retries))

    def audit(self, team: int, *, actor: str = "", action: str = "") -> AsyncIterator[dict[str, Any]]:
        """Who did what in a team, newest first; for its owners. Raises `Forbidden`."""
        return self.iterate(operations.audit(team, actor, action, self.retries))

    async def webhooks(self, team: int) -> list[dict[str, Any]]:
        """Where a team's alerts are posted; for its owners."""
        return await self.perform(operations.items(f"teams/{int(team)}/webhooks", self.retries))

    async def add_webhook(self, team: int, url: str, conditions: Iterable[str]) -> dict[str, Any]:
        """Post a team's alerts to an https address: the webhook with its `secret`, which is shown this once."""
        return await self.perform(operations.add_webhook(team, url, conditions, self.retries))

    async def change_webhook(self, team: int, webhook: int, *, on: bool, conditions: Iterable[str]) -> dict[str, Any]:
        """Switch a webhook, and choose what is posted to it."""
        return await self.perform(operations.change_webhook(team, webhook, on, conditions, self.retries))

    async def delete_webhook(self, team: int, webhook: int) -> None:
        """Post there no more."""
        await self.perform(operations.remove_webhook(team, webhook, self.retries))

    async def compare(
        self,
        runs: Iterable[RunFacts | int],
        *,
        keys: Iterable[str] = (),
        x: str = "step",
        target_reward: float | None = None,
        baseline: RunFacts | int | None = None,
        group: str = "",
        max_points: int = 1000,
    ) -> Comparison:
        """Runs side by side; as `Client.compare`."""
        asks = operations.compare(runs, keys, x, target_reward, baseline, group, max_points, self.retries)
        return await self.perform(asks)

    async def close(self) -> None:
        """Close its connections; `async with AsyncClient() as c:` does."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class AsyncRun(RunFacts):
    """As `run.Run`, awaited."""

    def __init__(self, client: AsyncClient, told: dict[str, Any]) -> None:
        super().__init__(told, client.url)
        self._client = client

    async def _now(self, flow: Flow[dict[str, Any]]) -> AsyncRun:
        self._take(await self._client.perform(flow))
        return self

    async def _ask(self, deed: str, **body: Any) -> AsyncRun:
        return await self._now(operations.act(self.id, deed, body, self._client.retries))

    async def refresh(self) -> AsyncRun:
        """Fetch its summary again."""
        return await self._now(operations.show(self.id, self._client.retries))

    async def cancel(self) -> AsyncRun:
        """Cancel it."""
        return await self._ask("cancel")

    async def pause(self) -> AsyncRun:
        """Pause it; its engine saves first."""
        return await self._ask("pause")

    async def resume(self, checkpoint: CheckpointFacts | None = None) -> AsyncRun:
        """Let a paused run wait for devices again; with a checkpoint of its own, to go on from there."""
        return await self._ask("resume" if checkpoint is None else f"checkpoints/{checkpoint.id}/resume")

    async def set_priority(self, priority: int) -> AsyncRun:
        """1 to 99; higher goes first within the team."""
        return await self._ask("priority", priority=priority)

    async def extend(self, hours: float) -> AsyncRun:
        """Give it so many hours more on devices."""
        return await self._ask("extend", hours=hours)

    async def tag(self, *add: str, remove: Iterable[str] = ()) -> AsyncRun:
        """Give and take away tags."""
        return await self._ask("tags", add=list(add), remove=list(remove))

    async def pin(self) -> AsyncRun:
        """Make it its project's baseline."""
        return await self._ask("pin")

    async def unpin(self) -> AsyncRun:
        """Its project has no baseline any more."""
        return await self._ask("unpin")

    async def silence(self, silent: bool = True) -> AsyncRun:
        """Hear of no alerts of it, or of them again."""
        return await self._ask("silence", silent=silent)

    async def archive(self) -> AsyncRun:
        """Hide it from lists, once it has ended; the filter `archived:yes` finds it."""
        return await self._ask("archive")

    async def unarchive(self) -> AsyncRun:
        """Show it on lists again."""
        return await self._ask("unarchive")

    async def delete(self) -> dict[str, Any]:
        """Put it into the trash."""
        return await self._client.perform(operations.remove(self.id, self._client.retries))

    async def restore(self) -> AsyncRun:
        """Out of the trash."""
        return await self._ask("restore")

    async def fork(
        self, changes: spec_source.Changes | None = None, *, step: int | None = None, name: str | None = None
    ) -> AsyncRun:
        """A new run with this one's spec; as `Run.fork`."""
        flow = spec_source.fork(self.summary, changes, step, name, self._client.retries)
        return AsyncRun(self._client, await self._client.perform(flow))

    async def spec(self) -> dict[str, Any]:
        """What it was asked to do, defaults included."""
        return await self._client.perform(spec_source.spec_of_run(self.id, self._client.retries))

    async def spec_yaml(self) -> str:
        """The same as YAML."""
        return await self._client.perform(operations.text(f"runs/{self.id}/spec.yaml", self._client.retries))

    async def changes(self) -> AsyncIterator[dict[str, Any]]:
        """Its summary now and whenever it moves on, until it has ended; as `Run.changes`."""
        async for told in self._client.iterate(changes([self.id], self._client.retries)):
            self._take(told)
            yield told

    async def wait(self, timeout: float | None = None, *, check: bool = False) -> AsyncRun:
        """Return when it has ended; as `Run.wait`."""
        async for told in self._client.iterate(changes([self.id], self._client.retries, within_s=timeout)):
            self._take(told)
        if check and self.state != "succeeded":
            raise RunFailed(f"Run {self.id} ended as {self.state}: {self.reason}")
        return self

    async def watch(self, file: TextIO | None = None) -> AsyncRun:
        """Show its progress until it ends."""
        shown = view(file)
        try:
            async for _ in self.changes():
                shown.show(self)
        finally:
            shown.end(self)
        return self

    async def metrics(
        self, keys: str | Iterable[str], x: str = "step", *, max_points: int | None = None, frame: bool | None = None
    ) -> Any:
        """Metrics as columns; as `Run.metrics`."""
        return framed(await self._client.perform(series.metrics(self.id, keys, x, max_points, self._client.retries)), frame)

    async def plot(self, keys: str | Iterable[str] = REWARD, x: str = "step", *, max_points: int = 2000) -> Any:
        """A Plotly figure of metrics. Raises `MissingPackage`."""
        optional_deps.needed("plotly.graph_objects", "A plot")
        return line_plot(self, await self.metrics(keys, x, max_points=max_points, frame=False), x)

    async def timeline(self, steps: range | Iterable[int] | None = None, *, theme: str = "light") -> Timeline:
        """What every device did in these steps; as `Run.timeline`."""
        return await self._client.perform(operations.timeline(self.id, steps, theme, self._client.retries))

    def samples(self, **wanted: Any) -> AsyncIterator[Sample]:
        """Recorded answers, page by page; as `Run.samples`."""
        return self._client.iterate(operations.samples(self.id, wanted, self._client.retries))

    def logs(
        self, *, follow: bool = False, tail: int | None = 1000, stream: str | None = None, q: str = ""
    ) -> AsyncIterator[LogLine]:
        """The last lines, and those that come; as `Run.logs`."""
        return self._client.iterate(operations.logs(self.id, tail, follow, stream, q, self._client.retries))

    def events(self, kinds: Iterable[str] = (), q: str = "") -> AsyncIterator[dict[str, Any]]:
        """What befell it, newest first."""
        return self._client.iterate(operations.events(self.id, kinds, q, self._client.retries))

    async def usage(self) -> dict[str, Any]:
        """Devices held for it so far, and now."""
        return await self._client.perform(asked(get(f"runs/{self.id}/usage"), self._client.retries))

    async def saving(self) -> dict[str, Any]:
        """What overlap has saved."""
        return await self._client.perform(asked(get(f"runs/{self.id}/saving"), self._client.retries))

    async def trace(self, steps: range | Iterable[int]) -> str:
        """At most 50 recorded steps as Chrome trace JSON."""
        return await self._client.perform(operations.trace(self.id, steps, self._client.retries))

    async def checkpoints(self) -> list[AsyncCheckpoint]:
        """Its checkpoints, newest step first."""
        found = await self._client.perform(operations.checkpoints(self.id, self._client.retries))
        return [AsyncCheckpoint(self, told) for told in found]

    async def checkpoint(self, which: str | int = "latest") -> AsyncCheckpoint:
        """One checkpoint; as `Run.checkpoint`."""
        return AsyncCheckpoint(self, await self._client.perform(operations.checkpoint(self.id, which, self._client.retries)))


class AsyncCheckpoint(CheckpointFacts):
    """A checkpoint that can be fetched and forked."""

    def __init__(self, run: AsyncRun, told: dict[str, Any]) -> None:
        super().__init__(told)
        self._run = run

    async def download(self, out: str | os.PathLike[str]) -> Path:
        """Fetch its folder into `out`; as `Checkpoint.download`."""
        client = self._run._client
        target = downloading.target_of(self.name, self._run.id, self.id, out)
        if not downloading.there_already(target, self.told):
            await client.perform(downloading.fetched(self._run.id, self.told, target, client.retries))
            await asyncio.to_thread(downloading.unpack, target, self.told)
        return target.folder

    async def fork(self, changes: spec_source.Changes | None = None, *, name: str | None = None) -> AsyncRun:
        """A new run that begins with it."""
        return await self._run.fork(changes, step=self.step, name=name)
