"""The scorers on a GPU, the actor's or one of their own: a thread launches their work, on a stream of their own.

Decoding and scoring are both bound by the host that launches them. Were one thread to launch both, no round of decoding would
begin while a chunk's reads are launched. torch lets go of Python's lock in every operator, so two threads take turns, and the
device runs what either has queued. What the scorers read comes from the host and what they find goes there, so the two streams
never wait for each other.

The queue is bounded as that to a process is (`scoring/process.py`), and a wait ends likewise: with the answer, with the thread's
error, or when the thread has shown no sign of life for too long.
"""

from __future__ import annotations

import faulthandler
import queue
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from oppo_core.scoring.channel import POLL_S
from oppo_core.scoring.process import ENDS_WITHIN_S, ORDERS_AHEAD, ScorerError
from oppo_core.scoring.proxy import OrderedScorers
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.trace.recorder import Recorder, Shrunk, Span, Wait


@dataclass(frozen=True, slots=True)
class Answer:
    """What a `start_…` gave, and what was recorded since the last answer."""

    result: object
    spans: list[Span]
    waits: list[Wait]
    shrunk: list[Shrunk]


class ThreadedScorers(OrderedScorers):
    """A `Scoring` whose work a thread of this process launches, in the order in which it was asked for."""

    def __init__(
        self,
        build: Callable[[Recorder], ScorerSet],
        recorder: Recorder,
        device: torch.device,
        trace: Recorder,
        longest_silence_s: float,
    ) -> None:
        """`build` is called here and now, with `recorder`, which is the thread's from then on; on a CPU there is no stream.

        Raises whatever `build` raises.
        """
        self._trace = trace
        self._longest_silence_s = longest_silence_s
        self._aside = stream_aside(device)
        with self._aside():
            self._scorers = build(recorder)
        self._scorers.alive = self._is_alive
        self.saves_bytes = self._scorers.saves_bytes
        self._orders: queue.Queue[tuple[str, tuple[object, ...]] | None] = queue.Queue(ORDERS_AHEAD)
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._closes = False
        self._pulse = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="oppo-scorers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; what it has not begun is left undone. One that hangs is left behind and ends with the process."""
        self._closes = True
        try:
            self._orders.put(None, timeout=ENDS_WITHIN_S)
        except queue.Full:
            return
        self._thread.join(timeout=ENDS_WITHIN_S)

    def _send(self, name: str, *arguments: object) -> None:
        self._raise_error()
        if self._orders.full():
            start = self._trace.clock()
            self._put_when_there_is_room(name, arguments)
            self._trace.held_up("score", start)
        else:
            self._orders.put((name, arguments))  # nobody else puts, so the place is still free

    def _put_when_there_is_room(self, name: str, arguments: tuple[object, ...]) -> None:
        while True:
            try:
                return self._orders.put((name, arguments), timeout=POLL_S)
            except queue.Full:
                self._check_pulse()

    def _receive(self) -> object:
        sent = time.monotonic()
        while True:
            self._raise_error()
            try:
                answer = self._answers.get(timeout=POLL_S)
            except queue.Empty:
                self._check_pulse(sent)
                continue
            self._raise_error()
            self._trace.spans += answer.spans
            self._trace.waits += answer.waits
            self._trace.shrunk += answer.shrunk
            return answer.result

    def _raise_error(self) -> None:
        if self._error is not None:
            raise ScorerError(f"{type(self._error).__name__}: {self._error}") from self._error

    def _is_alive(self) -> None:
        self._pulse = time.monotonic()

    def _check_pulse(self, sent: float = 0.0) -> None:
        if time.monotonic() - max(sent, self._pulse) > self._longest_silence_s:
            faulthandler.dump_traceback(all_threads=True)
            raise ScorerError(
                f"the scorers' thread gave no sign of life for {self._longest_silence_s:g} s (resources.longest_silence_s), so it"
                " is taken for hung; where it stands is written to the log"
            )

    def _serve(self) -> None:
        """Body of the thread: orders one after the other; after an error none is done any more, but all are taken."""
        with self._aside():
            while (order := self._orders.get()) is not None:
                self._is_alive()
                if self._error is None and not self._closes:
                    self._obey(*order)
                self._is_alive()
            self._scorers.close()

    def _obey(self, name: str, arguments: tuple[object, ...]) -> None:
        try:
            getattr(self._scorers, name)(*arguments)
            if name.startswith("start_"):
                result = getattr(self._scorers, name.replace("start_", "wait_"))()
                trace = self._scorers.trace
                self._answers.put(Answer(result, *trace.take(), trace.take_shrunk()))
        except Exception as error:  # noqa: BLE001 - whatever it was, the engine must hear of it and stop
            traceback.print_exc()
            self._error = error
            self._answers.put(Answer(None, [], [], []))  # wakes whoever waits


def stream_aside(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Entered by a thread: what it launches goes to a stream of its own, which begins after what is queued now."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return lambda: torch.cuda.stream(stream)
