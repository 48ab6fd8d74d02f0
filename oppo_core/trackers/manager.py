"""Starts and stops the tracker processes of a run, in the engine."""

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

STOPPED_FLUSH_S = 5.0  # upper limit when a run is paused or its node shuts down
MESSAGES_TIMEOUT_S = 1.0


class TrackerProcess:
    """A tracker's process. A thread copies its output to the run's log."""

    def __init__(self, config: TrackerConfig, log: Callable[[str], None]) -> None:
        """Start the process. Raises OSError."""
        self._config, self._log, self._title = config, log, TITLES[config.tracker]
        self._ending = False
        file = config.save()
        with config.file("log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "oppo_core.trackers", str(file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, env=_environment(),
            )  # fmt: skip
        self._messages = threading.Thread(target=self._copy_output, name=f"tracker-{config.tracker}", daemon=True)
        self._messages.start()

    def end(self, outcome: str) -> None:
        """Tell the process to send the rest and exit."""
        self._ending = True
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has exited
            self.process.stdin.write(outcome.encode())
            self.process.stdin.close()

    def wait(self, until: float, step: int) -> None:
        """After `end`: wait until `time.monotonic()` is `until`, then kill the process. Logs the unsent ones of `step` steps."""
        why = f"its process has ended ({self._config.file('log')})"
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            why = "the time limit logging.trackers.flush_s was reached"
            self.process.kill()
            self.process.wait()
        self._messages.join(MESSAGES_TIMEOUT_S)
        sent = read_cursor(self._config.file("json")).step
        if sent < step:
            self._log(f"{self._title}: steps {sent + 1} to {step} were not sent: {why}.")

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log(f"{self._title}: {line.decode(errors='replace').rstrip()}")
        status = self.process.wait()
        if not self._ending:
            self._log(
                f"{self._title}: its process has ended with status {status}, so nothing more is sent; see"
                f" {self._config.file('log')}. Training continues; a resumed run tries again."
            )


class Trackers:
    """The tracker processes of a run; none until `start`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._flush_s = 0.0
        self.processes: list[TrackerProcess] = []

    def start(self, spec: RunSpec, out: Path) -> None:
        """Start a process for each tracker in `spec`; it reads the event log from the present end."""
        settings, journal = spec.logging.trackers, self._journal
        self._flush_s = settings.flush_s
        plain = spec.model_dump(mode="json", exclude=set(PLATFORM_SECTIONS))
        for name, section in settings.enabled.items():
            config = TrackerConfig(
                name, section.model_dump(), plain, str(out.absolute()), str(journal.path.absolute()),
                journal.path.stat().st_size, settings.samples_every,
            )  # fmt: skip
            try:
                self.processes.append(TrackerProcess(config, self._log))
            except OSError as error:
                self._log(f"{TITLES[name]} cannot be started ({error}): nothing is sent. Training continues.")

    def close(self, outcome: str, step: int) -> None:
        """The run ends or pauses after `step`: stop all processes within one time limit."""
        until = time.monotonic() + (min(self._flush_s, STOPPED_FLUSH_S) if outcome == "stopped" else self._flush_s)
        for process in self.processes:
            process.end(outcome)
        for process in self.processes:
            process.wait(until, step)

    def _log(self, message: str) -> None:
        self._journal.write("log", stream="stdout", lines=[message])


def _environment() -> dict[str, str]:
    """The engine's environment with its module paths, without GPUs, and of W&B's variables only the API key."""
    paths = [str(Path(entry).absolute()) for entry in sys.path if entry]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_") or name == WANDB_KEY}
    return {**inherited, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
