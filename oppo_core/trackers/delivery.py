"""In a tracker's process: sends events to the tracker, and tries until the tracker has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.cursor import read_cursor
from oppo_core.trackers.protocol import OpenTracker, RefusedError, Samples, Say, Step, Tracker

AXES = ("elapsed_s", "generated_tokens", "device_seconds")  # of a step; sent besides its metrics
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
SAID_LENGTH = 400


class Delivery:
    """Sends one run to one tracker.

    Args:
        config: which tracker and run.
        open_tracker: opens the tracker's run.
        rewrites: see `Tracker`.
        say: takes a sentence for the run's log.
        pause: waits so many seconds.
    """

    def __init__(
        self, config: TrackerConfig, open_tracker: OpenTracker, rewrites: bool, say: Say, pause: Callable[[float], object]
    ) -> None:
        self._config, self._open, self._rewrites, self._say, self._pause = config, open_tracker, rewrites, say, pause
        self.cursor = read_cursor(config.file("json"))
        if self.cursor.events != config.events or self.cursor.offset > config.offset:  # it is of another log
            self.cursor.events, self.cursor.offset = config.events, config.offset
        self._tracker: Tracker | None = None
        self._takes_samples = True
        self._complaints: set[str] = set()

    def deliver(self, events: list[dict[str, Any]], offset: int) -> None:
        """Send events, which end at byte `offset` of the log. Returns when the tracker has them, or will never take them."""
        steps: list[Step] = []
        for event in events:
            if event["kind"] == "started":
                self._send(steps)
                steps = []
                self._begin(event["start_step"])
            elif event["kind"] == "step":
                metrics = event["metrics"] | {axis: event[axis] for axis in AXES}
                steps.append(Step(event["step"], event["time"], {key: float(value) for key, value in metrics.items()}))
        self._send(steps)
        every = self._config.samples_every
        for event in events:
            if event["kind"] == "samples" and every and event["step"] % every == 0:
                self._send_samples(Samples(event["step"], event["time"], event["samples"]))
        self.cursor.offset = offset
        self._save_cursor()

    def close(self, outcome: str) -> None:
        """End the tracker's run. A failure is reported, and not tried again."""
        if self._tracker is None:
            return
        try:
            self._tracker.close(outcome)
        except Exception as error:  # noqa: BLE001 - libraries of others raise what they like
            self._say(_sentence(error, "Its run may be shown as unfinished there."))

    def _begin(self, start: int) -> None:
        """An attempt continues after step `start`."""
        cursor = self.cursor
        if cursor.step > start:
            which = "they replace" if self._rewrites else "it keeps"
            self._say(f"steps {start + 1} to {cursor.step} may be trained again; {which} what was sent of them before.")
            if self._rewrites:
                self._drop_tracker()
                cursor.step, cursor.settled = start, 0
            else:
                cursor.settled = cursor.step
        self._retry(lambda tracker: None)

    def _send(self, steps: list[Step]) -> None:
        """Steps that were not sent yet, and the last one if it comes again, with an evaluation."""

        def send(tracker: Tracker) -> None:
            new = [step for step in steps if step.number >= self.cursor.step and step.number > self.cursor.settled]
            if new:
                tracker.log_steps(new)

        if steps:
            self._retry(send)
            self.cursor.step = max(self.cursor.step, steps[-1].number)

    def _send_samples(self, samples: Samples) -> None:
        if self._tracker is None or not self._takes_samples:
            return
        try:
            self._tracker.log_samples(samples)
        except Exception as error:  # noqa: BLE001 - see `close`
            self._takes_samples = False  # metrics are worth more than texts
            self._say(_sentence(error, "No more samples are sent to it; metrics are."))

    def _retry(self, work: Callable[[Tracker], None]) -> None:
        """Do `work` with an open tracker; after a failure open it again, after growing pauses."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                if self._tracker is None:
                    self._tracker = self._open(self._config, self.cursor, self._say)
                    self._save_cursor()
                work(self._tracker)
            except RefusedError as error:
                self._complain(error, "It is left out.")
                return
            except Exception as error:  # noqa: BLE001 - see `close`
                self._complain(error, "It is tried again, and then gets what it has missed. Training goes on.")
                self._drop_tracker()
                self._pause(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                if self._complaints:
                    self._say("it answers again.")
                    self._complaints.clear()
                return

    def _drop_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None and self._rewrites:
            with contextlib.suppress(Exception):
                tracker.close("failed")

    def _save_cursor(self) -> None:
        with contextlib.suppress(OSError):  # a full disk; then a resumed run may send some steps twice
            self.cursor.save(self._config.file("json"))

    def _complain(self, error: Exception, remedy: str) -> None:
        """Once for each kind of failure, as long as it lasts."""
        kind = type(error).__name__
        if kind not in self._complaints:
            self._complaints.add(kind)
            self._say(_sentence(error, remedy))


def _sentence(error: Exception, remedy: str) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:SAID_LENGTH]}. {remedy}"
