"""In the engine: starts and ends a process for each tracker of a run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from oppo_contract.spec import PLATFORM_SECTIONS, RunSpec
from oppo_core.reporting.event_log import Journal
from oppo_core.trackers.config import TITLES, WANDB_KEY, TrackerConfig
from oppo_core.trackers.cursor import read_cursor

WHEN_STOPPED_S = 5.0  # a pause, and more so a node that shuts down, cannot wait for long
PASSED_ON_WITHIN_S = 1.0


class TrackerProcess:
    """One tracker's process. A thread writes what it prints to the run's log."""

    def __init__(self, config: TrackerConfig, say: Callable[[str], None]) -> None:
        """Start it. Raises OSError."""
        self._config, self._say, self._title = config, say, TITLES[config.tracker]
        self._ending = False
        file = config.save()
        with config.file("log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "oppo_core.trackers", str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=_environment(),
            )  # fmt: skip
        self._messages = threading.Thread(target=self._pass_on, name=f"tracker-{config.tracker}", daemon=True)
        self._messages.start()

    def end(self, outcome: str) -> None:
        """Let it send the rest and end."""
        self._ending = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone
            self.process.stdin.write(outcome.encode())
            self.process.stdin.close()

    def wait(self, until: float, step: int) -> None:
        """After `end`: wait for it until `time.monotonic()` is `until`, then kill it. Says what it lacks of `step` steps."""
        why = f"its process has ended ({self._config.file('log')})"
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            why = "it had not taken them when time was up (logging.trackers.flush_s)"
            self.process.kill()
            self.process.wait()
        self._messages.join(PASSED_ON_WITHIN_S)
        sent = read_cursor(self._config.file("json")).step
        if sent < step:
            self._say(f"{self._title}: steps {sent + 1} to {step} were left out of it: {why}.")

    def _pass_on(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._say(f"{self._title}: {line.decode(errors='replace').rstrip()}")
        status = self.process.wait()
        if not self._ending:
            self._say(
                f"{self._title}: its process has ended with status {status}, so that no more is sent to it;"
                f" {self._config.file('log')} has its last words. Training goes on; a resumed run tries again."
            )


class Trackers:
    """None at first; `start` reads the spec."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._flush_s = 0.0
        self.processes: list[TrackerProcess] = []

    def start(self, spec: RunSpec, out: Path) -> None:
        """Start a process for every tracker that `spec` names; each follows the journal from here on."""
        settings, journal = spec.logging.trackers, self._journal
        self._flush_s = settings.flush_s
        plain = spec.model_dump(mode="json", exclude=set(PLATFORM_SECTIONS))
        for name, section in settings.enabled.items():
            config = TrackerConfig(
                name, section.model_dump(), plain, str(out.absolute()), str(journal.path.absolute()),
                journal.path.stat().st_size, settings.samples_every,
            )  # fmt: skip
            try:
                self.processes.append(TrackerProcess(config, self._say))
            except OSError as error:
                self._say(f"{TITLES[name]} cannot be started ({error}): nothing is sent to it. Training goes on.")

    def close(self, outcome: str, step: int) -> None:
        """The run ends or pauses after `step`: let them send the rest, all in the same time."""
        until = time.monotonic() + (min(self._flush_s, WHEN_STOPPED_S) if outcome == "stopped" else self._flush_s)
        for process in self.processes:
            process.end(outcome)
        for process in self.processes:
            process.wait(until, step)

    def _say(self, words: str) -> None:
        self._journal.write("log", stream="stdout", lines=[words])


def _environment() -> dict[str, str]:
    """The engine's, and where its modules come from; a tracker uses no GPU.

    Of W&B's own variables the key alone: the spec decides, not what was left in some shell.
    """
    paths = [str(Path(entry).absolute()) for entry in sys.path if entry]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") or name == WANDB_KEY}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
