"""`Run` and `Checkpoint`: lifecycle, metrics, samples, logs and downloads of one run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from oppo_client import downloading, optional_deps
from oppo_client.errors import NoCheckpoint, RunFailed
from oppo_client.html import escaped
from oppo_client.messages import Request, delete, get, post
from oppo_client.pagination import fetch_all, iter_log, iter_pages
from oppo_client.plots import plot_metrics
from oppo_client.progress import create_view
from oppo_client.records import LogLine, Sample, check_filters, parse_sample
from oppo_client.run_base import REWARD, RunBase
from oppo_client.run_updates import iter_updates
from oppo_client.series import fetch_metrics
from oppo_client.spec_source import Changes, fetch_created_run
from oppo_client.tables import to_frame
from oppo_client.timeline import Timeline
from oppo_client.transport import Session
from oppo_client.validation import CHECKPOINT, FIGURE, RUN, SAMPLE, TIMELINE

SAMPLE_FILTERS = frozenset(
    [f"{end}_{name}" for end in ("min", "max") for name in ("score", "length", "age")]
    + ["step", "from_step", "to_step", "ending", "held_out", "prompt", "q", "sort", "excerpt"]
)
LOG_STREAMS = ("stdout", "stderr", "supervisor", "platform")


class Run(RunBase):
    """A run. Lifecycle calls also update this object: `run.pause().state`. Calls raise `OppoError`."""

    def __init__(self, session: Session, summary: dict[str, Any]) -> None:
        super().__init__(summary, session.url)
        self._session = session

    def _refresh_from(self, request: Request) -> Run:
        self._update(self._session.json(request, RUN))
        return self

    def _post(self, action: str, **body: Any) -> Run:
        return self._refresh_from(post(f"runs/{self.id}/{action}", body))

    def refresh(self) -> Run:
        """Fetch the summary again."""
        return self._refresh_from(get(f"runs/{self.id}"))

    def cancel(self) -> Run:
        """Cancel the run: at once while it waits, otherwise through its engine. No effect on an ended run."""
        return self._post("cancel")

    def pause(self) -> Run:
        """Pause the run; its engine saves a checkpoint first."""
        return self._post("pause")

    def resume(self, checkpoint: Checkpoint | None = None) -> Run:
        """Queue a paused run again; with one of its checkpoints, resume from there."""
        return self._post("resume" if checkpoint is None else f"checkpoints/{checkpoint.id}/resume")

    def retry(self) -> Run:
        """Queue a failed run again, from its last checkpoint if it has one; earlier failures no longer count."""
        return self._post("retry")

    def set_priority(self, priority: int) -> Run:
        """1 to 99; higher starts first within the team."""
        return self._post("priority", priority=priority)

    def extend(self, hours: float) -> Run:
        """Extend the time limit by some hours."""
        return self._post("extend", hours=hours)

    def tag(self, *add: str, remove: Iterable[str] = ()) -> Run:
        """Add and remove tags."""
        return self._post("tags", add=list(add), remove=list(remove))

    def rename(self, name: str) -> Run:
        """Rename the run; its spec keeps the name that it was submitted with."""
        return self._post("rename", name=name)

    def note(self, text: str) -> Run:
        """Replace the run's notes, Markdown; `run.notes()` reads them."""
        return self._post("notes", text=text)

    def pin(self) -> Run:
        """Make the run its project's baseline."""
        return self._post("pin")

    def unpin(self) -> Run:
        """Remove the run as its project's baseline."""
        return self._post("unpin")

    def silence(self, silent: bool = True) -> Run:
        """Mute the run's alerts, or unmute them."""
        return self._post("silence", silent=silent)

    def archive(self) -> Run:
        """Hide an ended run from lists; the filter `archived:yes` finds it."""
        return self._post("archive")

    def unarchive(self) -> Run:
        """Show the run on lists again."""
        return self._post("unarchive")

    def delete(self) -> dict[str, Any]:
        """Move the run to the trash. The reply contains the time until which `restore` is possible."""
        return self._session.json(delete(f"runs/{self.id}"))

    def restore(self) -> Run:
        """Restore the run from the trash."""
        return self._post("restore")

    def fork(self, changes: Changes | None = None, *, step: int | None = None, name: str | None = None) -> Run:
        """A new run with this spec and changed values by dotted path; with `step`, it starts from that checkpoint."""
        body = {"changes": dict(changes or {}), "step": step, "name": name}
        return Run(self._session, fetch_created_run(self._session, f"runs/{self.id}/fork", body))

    def spec(self) -> dict[str, Any]:
        """The spec as a mapping, including defaults."""
        request = post("runs/validate", {"yaml": self.spec_yaml()}, idempotency_key=False)
        return dict(self._session.json(request, {"spec": dict})["spec"])

    def spec_yaml(self) -> str:
        """The spec as YAML, for `Client.submit(yaml=…)`."""
        return self._session.text(f"runs/{self.id}/spec.yaml")

    def spec_python(self) -> str:
        """Python source that submits the same spec with this client."""
        return self._session.text(f"runs/{self.id}/spec.py")

    def changes(self) -> Iterator[dict[str, Any]]:
        """The summary now and after every change, until the run has ended; updates this object."""
        for summary in iter_updates(self._session, [self.id]):
            self._update(summary)
            yield summary

    def wait(self, timeout: float | None = None, *, check: bool = False) -> Run:
        """Block until the run has ended. Raises `WaitTimeout` after `timeout` s; with `check`, `RunFailed` unless succeeded."""
        for summary in iter_updates(self._session, [self.id], timeout_s=timeout):
            self._update(summary)
        if check and self.state != "succeeded":
            raise RunFailed(f"Run {self.id} ended as {self.state}: {self.reason}")
        return self

    def watch(self, file: TextIO | None = None) -> Run:
        """Show live progress until the run ends. Interrupting the notebook cell stops the display, not the run."""
        view = create_view(file)
        try:
            for _ in self.changes():
                view.show(self)
        except KeyboardInterrupt:
            if not optional_deps.in_notebook():
                raise
        finally:
            view.end(self)
        return self

    def metrics(
        self, keys: str | Iterable[str], x: str = "step", *, max_points: int | None = None, frame: bool | None = None
    ) -> Any:
        """Metrics as columns: `step`, the axis, and one per key; a key that ends in `*` matches by prefix.

        Args:
            x: `step`, `wall_time` (training seconds), `tokens` (trained response tokens) or `gpu_seconds`.
            max_points: downsample longer series to this many rows, each a mean with extremes (`KEY low`, `KEY high`); None: all.
            frame: True: a DataFrame or `MissingPackage`; False: a `Table`; None: a DataFrame if pandas is installed.
        """
        return to_frame(fetch_metrics(self._session, self.id, keys, x, max_points), frame)

    def plot(self, keys: str | Iterable[str] = REWARD, x: str = "step", *, max_points: int = 2000) -> Any:
        """A Plotly figure of metrics. Raises `MissingPackage`."""
        optional_deps.require("plotly.graph_objects", "A plot")
        return plot_metrics(self, self.metrics(keys, x, max_points=max_points, frame=False), x)

    def timeline(self, steps: range | Iterable[int] | None = None, *, theme: str = "light") -> Timeline:
        """Device timeline of these steps, from the first to the last; default: the newest steps."""
        bounds = {} if steps is None else _step_bounds(steps)
        timeline = self._session.json(get(f"runs/{self.id}/timeline", **bounds), TIMELINE)
        figure = self._session.json(get(f"runs/{self.id}/timeline/figure", **bounds, theme=theme), FIGURE)
        return Timeline(self.id, timeline, figure)

    def samples(self, **filters: Any) -> Iterator[Sample]:
        """Recorded responses, newest step first: `step=100`, `min_score=…`, `q="sea"`, `sort="-score"`, … Raises `TypeError`."""
        check_filters("samples", filters, SAMPLE_FILTERS)
        return map(parse_sample, iter_pages(self._session, f"runs/{self.id}/samples", filters, SAMPLE))

    def logs(self, *, follow: bool = False, tail: int | None = 1000, stream: str | None = None, q: str = "") -> Iterator[LogLine]:
        """The last `tail` log lines (None: all); with `follow`, also new lines until the run has ended. Raises `ValueError`."""
        if stream is not None and stream not in LOG_STREAMS:
            raise ValueError(f"stream is {stream!r}; must be one of {', '.join(LOG_STREAMS)}")
        return iter_log(self._session, self.id, tail, follow, {"stream": stream, "q": q or None})

    def events(self, kinds: Iterable[str] = (), q: str = "") -> Iterator[dict[str, Any]]:
        """State changes, scheduling decisions, checkpoints and alerts, newest first."""
        return iter_pages(self._session, f"runs/{self.id}/events", {"kinds": ",".join(kinds), "q": q})

    def provenance(self) -> list[dict[str, Any]]:
        """`{"attempt", "provenance"}`, newest first: commits, versions, models, prompts and the command that repeats the run."""
        return fetch_all(self._session, f"runs/{self.id}/provenance")

    def notes(self) -> str:
        """Notes on the run, Markdown."""
        return str(self._session.json(get(f"runs/{self.id}"))["notes"])

    def usage(self) -> dict[str, Any]:
        """`{"device_hours", "devices"}`: device-hours so far, and devices held now."""
        return self._session.json(get(f"runs/{self.id}/usage"))

    def saving(self) -> dict[str, Any]:
        """`{"steps", "measured_s", "sequential_s", "saved_s"}`: time saved by overlap."""
        return self._session.json(get(f"runs/{self.id}/saving"))

    def trace(self, steps: range | Iterable[int]) -> str:
        """Up to 50 recorded steps as Chrome trace JSON, for ui.perfetto.dev."""
        return self._session.text(f"runs/{self.id}/trace.json", **_step_bounds(steps))

    def checkpoints(self) -> list[Checkpoint]:
        """Registered checkpoints, newest step first."""
        return [Checkpoint(self, row) for row in fetch_all(self._session, f"runs/{self.id}/checkpoints", CHECKPOINT)]

    def checkpoint(self, which: str | int = "latest") -> Checkpoint:
        """The newest checkpoint whose files are not deleted, or the one with this step or name. Raises `NoCheckpoint`."""
        checkpoints = self.checkpoints()
        if which == "latest":
            matches = [checkpoint for checkpoint in checkpoints if checkpoint.files != "deleted"]
        else:
            matches = [checkpoint for checkpoint in checkpoints if which in (checkpoint.step, checkpoint.name)]
        if matches:
            return matches[0]
        steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
        raise NoCheckpoint(f"Run {self.id} has no checkpoint {which}; available steps: {steps}.")


class Checkpoint:
    """A registered checkpoint.

    Attributes:
        data: the platform's reply.
    """

    def __init__(self, run: Run, data: dict[str, Any]) -> None:
        self._run = run
        self.data = data

    @property
    def id(self) -> int:
        """Number on the platform."""
        return int(self.data["id"])

    @property
    def step(self) -> int:
        """Completed PPO steps."""
        return int(self.data["step"])

    @property
    def name(self) -> str:
        """Name of the folder; marks a checkpoint within a step."""
        return str(self.data["name"])

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return int(self.data["bytes"])

    @property
    def files(self) -> str:
        """`here`: downloadable; `deleted`; `elsewhere`: the platform cannot read them."""
        return str(self.data["files"])

    @property
    def registered_at(self) -> datetime:
        """Time of registration with the platform."""
        return datetime.fromisoformat(self.data["registered_at"])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} step={self.step} {self.bytes:,} bytes, files {self.files}>"

    def _repr_html_(self) -> str:
        return f"<code>{escaped(self.name)}</code> <small>step {self.step}, {self.bytes:,} bytes, {escaped(self.files)}</small>"

    def download(self, out: str | os.PathLike[str]) -> Path:
        """Download the folder into `out` and verify it against its manifest. Atomic; resumes a partial download.

        Returns the folder. Raises `DownloadError`, `Conflict` if the platform does not have the files, `Forbidden` for viewers.
        """
        target = downloading.plan_download(self.name, self._run.id, self.id, out)
        digest = str(self.data["manifest_sha256"])
        if not downloading.is_downloaded(target, digest):
            downloading.fetch_archive(self._run._session, self._run.id, self.id, target, digest)
            downloading.unpack(target, digest)
        return target.folder

    def fork(self, changes: Changes | None = None, *, name: str | None = None) -> Run:
        """A new run that starts from this checkpoint."""
        return self._run.fork(changes, step=self.step, name=name)


def _step_bounds(steps: range | Iterable[int]) -> dict[str, int]:
    listed = list(steps)
    if not listed:
        raise ValueError("steps is empty")
    return {"from_step": min(listed), "to_step": max(listed)}
