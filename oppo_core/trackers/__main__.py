"""A tracker's process: `python -m oppo_core.trackers CONFIG`. What it prints are sentences for the run's log.

It follows the event log until the engine writes the run's outcome to its stdin, sends the rest, and ends. If the engine is gone
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

MOST_AT_ONCE = 500  # events
LOOK_EVERY_S = 1.0  # a call for several steps costs little more than one for a single step
PARENT_EVERY_S = 0.5
ORPHANS_LIVE_S = 5.0
NICER = 5  # than the engine, whose cores it shares
WORD_BYTES = 64


class Engine:
    """The engine's pipes. `outcome` is how the run ended, once `ended` is set."""

    def __init__(self) -> None:
        # Libraries, and what they start, must neither hold these pipes nor print into them.
        self._stdin, self._stdout = os.dup(0), os.dup(1)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self.outcome = "failed"
        self.ended = threading.Event()
        threading.Thread(target=self._wait, args=(os.getppid(),), name="engine", daemon=True).start()

    def say(self, words: str) -> None:
        """A sentence for the run's log."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdout, words.encode() + b"\n")

    def _wait(self, parent: int) -> None:
        ready: list[int] = []
        while not ready and os.getppid() == parent:
            ready, _, _ = select.select([self._stdin], [], [], PARENT_EVERY_S)
        word = os.read(self._stdin, WORD_BYTES).decode() if ready else ""
        self.outcome = word or self.outcome
        self.ended.set()
        if not word:
            time.sleep(ORPHANS_LIVE_S)
            os._exit(1)  # the tracker may hang


def main() -> None:
    """Serve one engine."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine says when to end
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICER)
    engine = Engine()
    config = TrackerConfig(**json.loads(Path(sys.argv[1]).read_text()))
    with config.file("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a killed engine may still send the same run
        tracker = importlib.import_module(f"oppo_core.trackers.{config.tracker}").TRACKER
        delivery = Delivery(config, tracker, tracker.rewrites, engine.say, time.sleep)
        _follow(delivery, engine)
        delivery.close(engine.outcome)


def _follow(delivery: Delivery, engine: Engine) -> None:
    tail = EventTail(Path(delivery.cursor.events), delivery.cursor.offset)
    while True:
        ended = engine.ended.is_set()  # asked before reading: the engine writes its last events before it ends
        events = tail.read(MOST_AT_ONCE)
        if tail.skipped:
            engine.say(f"{tail.skipped} events were deleted before they could be sent to it; they are left out.")
            tail.skipped = 0
        if events:
            delivery.deliver(events, tail.offset)
        elif ended:
            return
        else:
            engine.ended.wait(LOOK_EVERY_S)


if __name__ == "__main__":
    main()
