"""In a tracker's process: takes what the engine sends, and tries until the tracker has it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from oppo_core.trackers.memory import Memory, remembered
from oppo_core.trackers.order import Order
from oppo_core.trackers.records import Answers, Step
from oppo_core.trackers.sink import Opening, RefusedError, Say, Sink

FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
SAID_LENGTH = 400
KEEPS = "What is told meanwhile waits, up to a bound. Training goes on"


@dataclass(slots=True)
class Courier:
    """Everything that one tracker is told goes through `deliver`, in order.

    `say` tells the engine, `pause` waits so many seconds. What was delivered is remembered in the run's folder.
    """

    order: Order
    opening: Opening
    rewrites: bool
    say: Say
    pause: Callable[[float], None]
    memory: Memory = field(init=False)
    sink: Sink | None = None
    shows: bool = True
    said: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.memory = remembered(self._file)

    @property
    def _file(self) -> Path:
        return self.order.folder / f"{self.order.tracker}.json"

    def begin(self, start: int) -> None:
        """Training goes on after step `start`."""
        if self.memory.step > start:
            which = "they take the place of" if self.rewrites else "it keeps"
            self.say(f"steps {start + 1} to {self.memory.step} may be trained again; {which} what it was told of them before.")
            if self.rewrites:
                self.memory.go_back_to(start)
            else:
                self.memory.leave_alone()
        self._try(lambda sink: None)

    def deliver(self, steps: list[Step], answers: list[Answers]) -> None:
        """Return when the tracker has it, or will never take it."""
        after = self.memory.copy()
        news = [new for step in steps if (new := after.news(step)) is not None]

        def tell(sink: Sink) -> None:
            if news:
                sink.tell(news)

        self._try(tell)
        after.run, self.memory = self.memory.run, after
        self._remember()
        for shown in answers:
            self._show(shown)

    def _remember(self) -> None:
        with contextlib.suppress(OSError):  # a full disk; then a resumed run may tell some steps twice
            self.memory.save(self._file)

    def close(self, outcome: str) -> None:
        """The end. What fails now is told, and not tried again."""
        if self.sink is None:
            return
        try:
            self.sink.close(outcome)
        except Exception as error:  # noqa: BLE001 - libraries of others raise what they like
            self._complain(error, "Its run may be shown as unfinished there.")

    def _try(self, work: Callable[[Sink], None]) -> None:
        """Do `work` with an open sink; after a failure open it anew, after growing pauses."""
        wait_s = FIRST_WAIT_S
        while True:
            try:
                if self.sink is None:
                    self.sink = self.opening(self.order, self.memory, self.say)
                    self._remember()
                work(self.sink)
            except RefusedError as error:
                self._complain(error, "It is left out.")
                return
            except Exception as error:  # noqa: BLE001 - see above; a tracker that fails is tried again
                self._complain(error, f"{KEEPS}.")
                self._let_go()
                self.pause(wait_s)
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            else:
                if self.said:
                    self.say("it answers again.")
                    self.said.clear()
                return

    def _let_go(self) -> None:
        sink, self.sink = self.sink, None
        if sink is not None and self.rewrites:
            with contextlib.suppress(Exception):
                sink.close("failed")

    def _show(self, answers: Answers) -> None:
        if self.sink is None or not self.shows:
            return
        try:
            self.sink.show(answers)
        except Exception as error:  # noqa: BLE001 - see above
            self.shows = False  # metrics are worth more than texts
            self._complain(error, "No more answers are told to it; metrics are.")

    def _complain(self, error: Exception, remedy: str) -> None:
        """Once for each kind of failure, as long as it lasts."""
        kind = type(error).__name__
        if kind not in self.said:
            self.said.add(kind)
            self.say(f"{kind}: {' '.join(str(error).split())[:SAID_LENGTH]}. {remedy}")


def opening_of(name: str) -> tuple[Opening, bool]:
    """The tracker's module is imported here and nowhere else. Returns how to open it, and whether it rewrites steps."""
    module = importlib.import_module(f"oppo_core.trackers.{name}")
    kind = module.SINK
    return cast(Opening, kind), bool(kind.rewrites)


@contextmanager
def held(order: Order) -> Iterator[None]:
    """Within it no other process tells this run to this tracker: that of a killed engine may still be at it."""
    with (order.folder / f"{order.tracker}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
