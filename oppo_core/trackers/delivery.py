"""Sends events to a tracker, with retries, in the tracker's process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.cursor import read_cursor
from oppo_core.trackers.protocol import Log, OpenTracker, RefusedError, Samples, Step, Tracker

AXES = ("elapsed_s", "generated_tokens", "device_seconds")  # sent with a step's metrics
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
MAX_ERROR_CHARS = 400


class Delivery:
    """Sends one run to one tracker.

    Args:
        config: which tracker and run.
        open_tracker: opens the tracker's run.
        rewrites: see `Tracker`.
        log: writes a message to the run's log.
        pause: sleeps for some seconds.
    """

    def __init__(
        self, config: TrackerConfig, open_tracker: OpenTracker, rewrites: bool, log: Log, pause: Callable[[float], object]
    ) -> None:
        self._config, self._open, self._rewrites, self._log, self._pause = config, open_tracker, rewrites, log, pause
        self.cursor = read_cursor(config.file("json"))
        if self.cursor.events != config.events or self.cursor.offset > config.offset:
            self.cursor.events, self.cursor.offset = config.events, config.offset
        self._tracker: Tracker | None = None
        self._sends_samples = True
        self._logged_errors: set[str] = set()

    def deliver(self, events: list[dict[str, Any]], offset: int) -> None:
        """Send events, which end at byte `offset` of the log. Returns when the tracker has accepted or refused them."""
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
        """End the tracker's run. A failure is logged and not retried."""
        if self._tracker is None:
            return
        try:
            self._tracker.close(outcome)
        except Exception as error:  # noqa: BLE001 - third-party libraries raise anything
            self._log(_message(error, "Its run may be shown as unfinished there."))

    def _begin(self, start: int) -> None:
        """Begin an attempt that continues after step `start`."""
        cursor = self.cursor
        if cursor.step > start:
            which = "they replace" if self._rewrites else "it keeps"
            self._log(f"steps {start + 1} to {cursor.step} may be trained again; {which} what was sent before.")
            if self._rewrites:
                self._drop_tracker()
                cursor.step, cursor.settled = start, 0
            else:
                cursor.settled = cursor.step
        self._retry(lambda tracker: None)

    def _send(self, steps: list[Step]) -> None:
        """Send new steps, and the last one again if an evaluation was added to it."""

        def send(tracker: Tracker) -> None:
            new = [step for step in steps if step.number >= self.cursor.step and step.number > self.cursor.settled]
            if new:
                tracker.log_steps(new)

        if steps:
            self._retry(send)
            self.cursor.step = max(self.cursor.step, steps[-1].number)

    def _send_samples(self, samples: Samples) -> None:
        if self._tracker is None or not self._sends_samples:
            return
        try:
            self._tracker.log_samples(samples)
        except Exception as error:  # noqa: BLE001 - see `close`
            self._sends_samples = False
            self._log(_message(error, "No more samples are sent, only metrics."))

    def _retry(self, work: Callable[[Tracker], None]) -> None:
        """Do `work` with an open tracker; after a failure, reopen it and retry with exponential backoff."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if self._tracker is None:
                    self._tracker = self._open(self._config, self.cursor, self._log)
                    self._save_cursor()
                work(self._tracker)
            except RefusedError as error:
                self._log_error(error, "It is not sent.")
                return
            except Exception as error:  # noqa: BLE001 - see `close`
                self._log_error(error, "It is retried, and missed steps are sent then. Training continues.")
                self._drop_tracker()
                self._pause(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
            else:
                if self._logged_errors:
                    self._log("connected again.")
                    self._logged_errors.clear()
                return

    def _drop_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None and self._rewrites:
            with contextlib.suppress(Exception):
                tracker.close("failed")

    def _save_cursor(self) -> None:
        with contextlib.suppress(OSError):  # disk full; a resumed run may send some steps twice
            self.cursor.save(self._config.file("json"))

    def _log_error(self, error: Exception, remedy: str) -> None:
        """Log each kind of failure once until calls succeed again."""
        kind = type(error).__name__
        if kind not in self._logged_errors:
            self._logged_errors.add(kind)
            self._log(_message(error, remedy))


def _message(error: Exception, remedy: str) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}. {remedy}"
