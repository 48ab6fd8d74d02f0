"""A tracker's process: `python -m oppo_core.trackers CONFIG`. The lines it prints go to the run's log.

It reads the event log until the engine writes the run's outcome to its stdin, sends the rest, and exits. If the engine has died
instead, it has a few seconds for the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from oppo_core.trackers.config import TrackerConfig
from oppo_core.trackers.delivery import Delivery
from oppo_core.trackers.event_tail import EventTail

BATCH_EVENTS = 500
POLL_S = 1.0  # one call for several steps costs little more than for one
PARENT_POLL_S = 0.5
ORPHAN_TIMEOUT_S = 5.0
NICENESS = 5  # below the engine, which shares the cores
OUTCOME_BYTES = 64


class EngineConnection:
    """The pipes to the engine. `outcome` is the run's, once `ended` is set."""

    def __init__(self) -> None:
        # Duplicated so that libraries and their child processes neither inherit these pipes nor print into them.
        self._stdin, self._stdout = os.dup(0), os.dup(1)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self.outcome = "failed"
        self.ended = threading.Event()
        threading.Thread(target=self._wait, args=(os.getppid(),), name="engine", daemon=True).start()

    def log(self, message: str) -> None:
        """Write a message to the run's log."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdout, message.encode() + b"\n")

    def _wait(self, parent: int) -> None:
        ready: list[int] = []
        while not ready and os.getppid() == parent:
            ready, _, _ = select.select([self._stdin], [], [], PARENT_POLL_S)
        outcome = os.read(self._stdin, OUTCOME_BYTES).decode() if ready else ""
        self.outcome = outcome or self.outcome
        self.ended.set()
        if not outcome:
            time.sleep(ORPHAN_TIMEOUT_S)
            os._exit(1)  # the tracker may hang


def main() -> None:
    """Run the tracker of one engine."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides when to stop
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    engine = EngineConnection()
    config = TrackerConfig(**json.loads(Path(sys.argv[1]).read_text()))
    with config.file("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a killed engine's process may still send the same run
        tracker = importlib.import_module(f"oppo_core.trackers.{config.tracker}").TRACKER
        delivery = Delivery(config, tracker, tracker.rewrites, engine.log, time.sleep)
        _follow(delivery, engine)
        delivery.close(engine.outcome)


def _follow(delivery: Delivery, engine: EngineConnection) -> None:
    tail = EventTail(Path(delivery.cursor.events), delivery.cursor.offset)
    while True:
        ended = engine.ended.is_set()  # read first: the engine writes its last events before
        events = tail.read(BATCH_EVENTS)
        if tail.skipped:
            engine.log(f"{tail.skipped} events were deleted before they could be sent.")
            tail.skipped = 0
        if events:
            delivery.deliver(events, tail.offset)
        elif ended:
            return
        else:
            engine.ended.wait(POLL_S)


if __name__ == "__main__":
    main()
