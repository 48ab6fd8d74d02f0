"""A tracker's process: `python -m oppo_core.trackers`, lines of JSON on stdin, what it has to say on stdout.

It ends when it is told to, or when the engine is gone: then it gets a few seconds for what it has already been sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import threading
import time
from typing import Any

from oppo_core.trackers.courier import Courier, held, opening_of
from oppo_core.trackers.order import order_of
from oppo_core.trackers.records import answers_of, step_of

MOST_AT_ONCE = 100
GATHER_S = 1.0  # a call for several steps costs little more than one for a single step
LOOK_EVERY_S = 0.5
ORPHANS_LIVE_S = 5.0
NICER = 5  # than the engine, whose cores it shares

Message = dict[str, Any]
ENDED_UNTOLD: Message = {"kind": "end", "outcome": "failed"}


class Inbox:
    """Messages of the engine, read ahead by a thread as far as its bound goes."""

    def __init__(self) -> None:
        # What libraries start must not hold the engine's pipe: the engine would wait for it, whatever becomes of us.
        self._lines = os.fdopen(os.dup(0), "rb")
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        self._waiting: queue.Queue[Message] = queue.Queue(MOST_AT_ONCE)
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            self._waiting.put(json.loads(line))
        self._waiting.put(ENDED_UNTOLD)

    def next(self) -> Message:
        """The next message, once there is one."""
        return self._waiting.get()

    def batch(self) -> list[Message]:
        """The next message, once there is one, and those that come within a second of it; `end` is the last of its batch."""
        messages = [self.next()]
        until = time.monotonic() + GATHER_S
        with contextlib.suppress(queue.Empty):
            while messages[-1]["kind"] != "end" and len(messages) < MOST_AT_ONCE:
                messages.append(self._waiting.get(timeout=max(0.0, until - time.monotonic())))
        return messages


class Link:
    """The way back to the engine. Nobody may be there any more."""

    def __init__(self) -> None:
        # What libraries print must not get between our lines.
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def send(self, message: Message) -> None:
        """One line; shorter than what a pipe takes whole."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, json.dumps(message).encode() + b"\n")

    def say(self, words: str) -> None:
        """A sentence for the run's log."""
        self.send({"say": words})


def main() -> None:
    """Serve one engine."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine says when it is time
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.nice(NICER)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="engine", daemon=True).start()
    link, inbox = Link(), Inbox()
    order = order_of(inbox.next())
    opening, rewrites = opening_of(order.tracker)
    first = inbox.next()
    if first["kind"] != "started":  # the run came to nothing
        return
    with held(order):
        courier = Courier(order, opening, rewrites, link.say, time.sleep)
        courier.begin(first["start_step"])
        courier.close(_serve(courier, inbox, link))


def _serve(courier: Courier, inbox: Inbox, link: Link) -> str:
    """Deliver until the end; returns how the run ended."""
    while True:
        messages = inbox.batch()
        steps = [step_of(message) for message in messages if message["kind"] == "step"]
        answers = [answers_of(message) for message in messages if message["kind"] == "samples"]
        if steps or answers:
            courier.deliver(steps, answers)
        if steps:
            link.send({"taken": len(steps)})
        if messages[-1]["kind"] == "end":
            return str(messages[-1]["outcome"])


def _end_with(engine: int) -> None:
    """A tracker that hangs would otherwise live for ever."""
    while os.getppid() == engine:
        time.sleep(LOOK_EVERY_S)
    time.sleep(ORPHANS_LIVE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
