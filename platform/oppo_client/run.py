"""A run on the platform, for code that waits for each answer. Its asynchronous twin is `aio.AsyncRun`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from oppo_client import downloading, operations, optional_deps, series, spec_source
from oppo_client.checkpoint import CheckpointFacts
from oppo_client.errors import RunFailed
from oppo_client.pagination import changes
from oppo_client.plots import line_plot
from oppo_client.progress import view
from oppo_client.records import LogLine, Sample
from oppo_client.run_base import REWARD, RunFacts
from oppo_client.sans_io import Flow, asked, get
from oppo_client.session import Session
from oppo_client.tables import framed
from oppo_client.timeline import Timeline


class Run(RunFacts):
    """A run. What is asked of it changes this object, too: `run.pause().state`. Calls raise `OppoError`."""

    def __init__(self, client: Session, told: dict[str, Any]) -> None:
        super().__init__(told, client.url)
        self._client = client

    def _now(self, flow: Flow[dict[str, Any]]) -> Run:
        self._take(self._client.perform(flow))
        return self

    def _ask(self, deed: str, **body: Any) -> Run:
        return self._now(operations.act(self.id, deed, body, self._client.retries))

    def refresh(self) -> Run:
        """Fetch its summary again."""
        return self._now(operations.show(self.id, self._client.retries))

    def cancel(self) -> Run:
        """Cancel it: at once when it waits, otherwise its engine is told. Nothing happens to one that has ended."""
        return self._ask("cancel")

    def pause(self) -> Run:
        """Pause it; its engine saves first."""
        return self._ask("pause")

    def resume(self, checkpoint: CheckpointFacts | None = None) -> Run:
        """Let a paused run wait for devices again; with a checkpoint of its own, to go on from there."""
        return self._ask("resume" if checkpoint is None else f"checkpoints/{checkpoint.id}/resume")

    def set_priority(self, priority: int) -> Run:
        """1 to 99; higher goes first within the team."""
        return self._ask("priority", priority=priority)

    def extend(self, hours: float) -> Run:
        """Give it so many hours more on devices."""
        return self._ask("extend", hours=hours)

    def tag(self, *add: str, remove: Iterable[str] = ()) -> Run:
        """Give and take away tags."""
        return self._ask("tags", add=list(add), remove=list(remove))

    def pin(self) -> Run:
        """Make it its project's baseline."""
        return self._ask("pin")

    def unpin(self) -> Run:
        """Its project has no baseline any more."""
        return self._ask("unpin")

    def silence(self, silent: bool = True) -> Run:
        """Hear of no alerts of it, or of them again."""
        return self._ask("silence", silent=silent)

    def archive(self) -> Run:
        """Hide it from lists, once it has ended; the filter `archived:yes` finds it."""
        return self._ask("archive")

    def unarchive(self) -> Run:
        """Show it on lists again."""
        return self._ask("unarchive")

    def delete(self) -> dict[str, Any]:
        """Put it into the trash; tells until when `restore` brings it back."""
        return self._client.perform(operations.remove(self.id, self._client.retries))

    def restore(self) -> Run:
        """Out of the trash."""
        return self._ask("restore")

    def fork(
        self,
        changes: spec_source.Changes | None = None,
        *,
        step: int | None = None,
        name: str | None = None,
    ) -> Run:
        """A new run with this one's spec and other values at dotted paths; with `step`, it begins with that checkpoint."""
        retries = self._client.retries
        return Run(self._client, self._client.perform(spec_source.fork(self.summary, changes, step, name, retries)))

    def spec(self) -> dict[str, Any]:
        """What it was asked to do, defaults included."""
        return self._client.perform(spec_source.spec_of_run(self.id, self._client.retries))

    def spec_yaml(self) -> str:
        """The same as YAML, which `Client.submit(yaml=…)` takes."""
        return self._client.perform(operations.text(f"runs/{self.id}/spec.yaml", self._client.retries))

    def changes(self) -> Iterator[dict[str, Any]]:
        """Its summary now and whenever it moves on, until it has ended; this object goes along."""
        for told in self._client.iterate(changes([self.id], self._client.retries)):
            self._take(told)
            yield told

    def wait(self, timeout: float | None = None, *, check: bool = False) -> Run:
        """Return when it has ended. Raises `WaitTimeout` after so many seconds, with `check` `RunFailed` unless it succeeded."""
        for told in self._client.iterate(changes([self.id], self._client.retries, within_s=timeout)):
            self._take(told)
        if check and self.state != "succeeded":
            raise RunFailed(f"Run {self.id} ended as {self.state}: {self.reason}")
        return self

    def watch(self, file: TextIO | None = None) -> Run:
        """Show its progress until it ends. In a notebook, stopping the cell stops watching, not the run."""
        shown = view(file)
        try:
            for _ in self.changes():
                shown.show(self)
        except KeyboardInterrupt:
            if not optional_deps.in_notebook():
                raise
        finally:
            shown.end(self)
        return self

    def metrics(
        self, keys: str | Iterable[str], x: str = "step", *, max_points: int | None = None, frame: bool | None = None
    ) -> Any:
        """Metrics as columns: `step`, the axis, and one a key; `*` at a key's end stands for all that begin so.

        Args:
            x: `step`, `wall_time` (training seconds), `tokens` (trained response tokens) or `gpu_seconds`.
            max_points: thin longer series to so many rows, each a mean with extremes (`KEY low`, `KEY high`); None: every point.
            frame: True: a DataFrame or `MissingPackage`; False: a `Table`; None: a DataFrame if pandas is installed.
        """
        return framed(self._client.perform(series.metrics(self.id, keys, x, max_points, self._client.retries)), frame)

    def plot(self, keys: str | Iterable[str] = REWARD, x: str = "step", *, max_points: int = 2000) -> Any:
        """A Plotly figure of metrics. Raises `MissingPackage`."""
        optional_deps.needed("plotly.graph_objects", "A plot")
        return line_plot(self, self.metrics(keys, x, max_points=max_points, frame=False), x)

    def timeline(self, steps: range | Iterable[int] | None = None, *, theme: str = "light") -> Timeline:
        """What every device did in these steps, from the first to the last of them; the newest ones by default."""
        return self._client.perform(operations.timeline(self.id, steps, theme, self._client.retries))

    def samples(self, **wanted: Any) -> Iterator[Sample]:
        """Recorded answers, page by page, newest step first: `step=100`, `min_score=…`, `q="sea"`, `sort="-score"`, …"""
        return self._client.iterate(operations.samples(self.id, wanted, self._client.retries))

    def logs(self, *, follow: bool = False, tail: int | None = 1000, stream: str | None = None, q: str = "") -> Iterator[LogLine]:
        """The last `tail` lines (None: all); with `follow` also those that come, until it has ended."""
        return self._client.iterate(operations.logs(self.id, tail, follow, stream, q, self._client.retries))

    def events(self, kinds: Iterable[str] = (), q: str = "") -> Iterator[dict[str, Any]]:
        """What befell it, newest first: changes of state, decisions, checkpoints, alerts."""
        return self._client.iterate(operations.events(self.id, kinds, q, self._client.retries))

    def usage(self) -> dict[str, Any]:
        """`{"device_hours", "devices"}`: devices held for it so far, and now."""
        return self._client.perform(asked(get(f"runs/{self.id}/usage"), self._client.retries))

    def saving(self) -> dict[str, Any]:
        """`{"steps", "measured_s", "sequential_s", "saved_s"}`: what overlap has saved."""
        return self._client.perform(asked(get(f"runs/{self.id}/saving"), self._client.retries))

    def trace(self, steps: range | Iterable[int]) -> str:
        """At most 50 recorded steps as Chrome trace JSON, for ui.perfetto.dev."""
        return self._client.perform(operations.trace(self.id, steps, self._client.retries))

    def checkpoints(self) -> list[Checkpoint]:
        """Its checkpoints, newest step first."""
        found = self._client.perform(operations.checkpoints(self.id, self._client.retries))
        return [Checkpoint(self, told) for told in found]

    def checkpoint(self, which: str | int = "latest") -> Checkpoint:
        """The newest checkpoint whose files were not deleted, or the one of a step or a name. Raises `NoCheckpoint`."""
        return Checkpoint(self, self._client.perform(operations.checkpoint(self.id, which, self._client.retries)))


class Checkpoint(CheckpointFacts):
    """A checkpoint that can be fetched and forked."""

    def __init__(self, run: Run, told: dict[str, Any]) -> None:
        super().__init__(told)
        self._run = run

    def download(self, out: str | os.PathLike[str]) -> Path:
        """Fetch its folder into `out`, checked by its manifest: whole or not there at all. Goes on where an earlier call ended.

        Returns the folder. Raises `DownloadError`, `Conflict` when the platform does not have the files, `Forbidden` for viewers.
        """
        client = self._run._client
        target = downloading.target_of(self.name, self._run.id, self.id, out)
        if not downloading.there_already(target, self.told):
            client.perform(downloading.fetched(self._run.id, self.told, target, client.retries))
            downloading.unpack(target, self.told)
        return target.folder

    def fork(self, changes: spec_source.Changes | None = None, *, name: str | None = None) -> Run:
        """A new run that begins with it."""
        return self._run.fork(changes, step=self.step, name=name)
