"""The scorers in a process of their own: they read a chunk while the actor decodes the next one.

A process, not a thread: two processes of one pinned thread each overlap at 1.5 to 2 ×, two threads of one process at 1.4 to
1.65 × (measured on two cores). The channel ends with either side, so neither outlives the other.

The queue between them is bounded: with `ORDERS_AHEAD` orders unfinished the actor waits, and is held up until one is done. Every
wait on this side ends: with the answer, with the process's death, or when it has shown no sign of life for too long. A sign of
life is an order begun or ended, and `alive()` in the middle of a long one, while a reward service is waited for, say.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext
from multiprocessing.synchronize import Semaphore
from typing import Any, Literal, NoReturn, cast

import torch

from oppo_core.scoring.channel import POLL_S, Channel
from oppo_core.scoring.early import EarlyOrder
from oppo_core.scoring.proxy import OrderedScorers
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.trace.recorder import Recorder, Shrunk, Span, Wait

# Not forked: torch's threads and the driver of a GPU do not survive that.
START_METHOD: Literal["spawn"] = "spawn"
# Orders that may be unfinished: about as many as a step has chunks, so that a scorer which catches up in the end costs nothing.
ORDERS_AHEAD = 32
# Loading large models from a slow disk is silent; whatever the spec allows, so long it may take.
LOADED_WITHIN_S = 600.0
ENDS_WITHIN_S = 5.0
HUNG_ENDS_WITHIN_S = 0.5  # time to write its stack


class ScorerError(RuntimeError):
    """The scorer process failed, died or fell silent; the message says which, and how."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a `start_…`: its result, or the error that ended the process, and what was recorded since the last answer."""

    result: object
    error: str | None
    spans: list[Span]
    waits: list[Wait]
    shrunk: list[Shrunk]


class Line:
    """What connects the two processes beside the channel: free places in the queue, and the other side's last sign of life."""

    def __init__(self, context: SpawnContext) -> None:
        self.places: Semaphore = context.Semaphore(ORDERS_AHEAD)
        self._pulse: Any = context.RawValue("d", 0.0)

    def alive(self) -> None:
        """Give a sign of life. `time.monotonic` is one clock for both."""
        self._pulse.value = time.monotonic()

    @property
    def pulse(self) -> float:
        """`time.monotonic()` of the last sign of life."""
        return float(self._pulse.value)


class RemoteScorers(OrderedScorers):
    """A `Scoring` whose work happens in a child process, in the order in which it was asked for."""

    def __init__(
        self,
        build: Callable[[Recorder], ScorerSet],
        devices: tuple[str, ...],
        threads: int,
        trace: Recorder,
        longest_silence_s: float,
    ) -> None:
        """Start the process; `build` runs there and must be picklable.

        Raises:
            ScorerError: it failed, died, or did not load within `LOADED_WITHIN_S` or `longest_silence_s`.
        """
        context = multiprocessing.get_context(START_METHOD)
        self._line = Line(context)
        self._channel, theirs = Channel.pair()
        self._process = context.Process(
            target=_serve, args=(theirs, self._line, build, devices, threads), name="oppo-scorers", daemon=True
        )
        self._process.start()
        theirs.close()
        self._trace = trace
        self._sent = time.monotonic()
        self._is_hung = False
        self._longest_silence_s = max(longest_silence_s, LOADED_WITHIN_S)
        self.saves_bytes = cast(int, self._receive())
        self._longest_silence_s = longest_silence_s

    def train_early(self, order: EarlyOrder) -> None:
        """See `EarlyTraining.train_early`."""
        # What each token was sampled among has been handed over with the token.
        self._send("train_early", replace(order, sequences=[replace(s, support=[]) for s in order.sequences]))

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        self._process.join(timeout=HUNG_ENDS_WITHIN_S if self._is_hung else ENDS_WITHIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, name: str, *arguments: object) -> None:
        self._take_place()
        self._sent = time.monotonic()
        try:
            self._channel.send((name, arguments), self._look_after_it)
        except (BrokenPipeError, ConnectionResetError):
            self._end()

    def _take_place(self) -> None:
        """Returns once there is room in the queue."""
        if self._line.places.acquire(block=False):
            return
        start = self._trace.clock()
        while not self._line.places.acquire(timeout=POLL_S):
            self._look_after_it()
        self._trace.held_up("score", start)

    def _receive(self) -> object:
        try:
            reply = cast(Reply, self._channel.receive(self._check_pulse))
        except (EOFError, ConnectionResetError):
            raise self._dead() from None
        self._trace.spans += reply.spans
        self._trace.waits += reply.waits
        self._trace.shrunk += reply.shrunk
        if reply.error is not None:
            raise ScorerError(reply.error)
        return reply.result

    def _end(self) -> NoReturn:
        """The process takes nothing more: raises the error that ended it, which is still in the channel, if it told one."""
        self._receive()
        raise ScorerError("the scorer process closed its end of the channel")

    def _look_after_it(self) -> None:
        """Raises ScorerError when nobody will ever take what is to be sent."""
        if not self._process.is_alive():
            self._end()
        self._check_pulse()

    def _check_pulse(self) -> None:
        if time.monotonic() - max(self._sent, self._line.pulse) > self._longest_silence_s:
            raise self._silent()

    def _dead(self) -> ScorerError:
        self._process.join(timeout=ENDS_WITHIN_S)
        return ScorerError(f"the scorer process died with status {self._process.exitcode}")

    def _silent(self) -> ScorerError:
        self._is_hung = True
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGUSR1)  # it writes its stack to stderr
        return ScorerError(
            f"the scorer process gave no sign of life for {self._longest_silence_s:g} s (resources.longest_silence_s), so it is"
            " taken for hung; where it stands is written to the log"
        )


def _wait_on() -> None:
    """The scorers wait for orders as long as the engine lives."""


def _serve(channel: Channel, line: Line, build: Callable[[Recorder], ScorerSet], devices: tuple[str, ...], threads: int) -> None:
    """Body of the process: messages in order, an answer to the first (ready) and to every `start_…`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides what it means
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(threads)
    trace = Recorder(devices)
    try:
        scorers = build(trace)
        scorers.alive = line.alive
        channel.send(Reply(scorers.saves_bytes, None, *trace.take(), trace.take_shrunk()), _wait_on)
        while True:
            name, arguments = cast(Any, channel.receive(_wait_on))
            line.alive()
            getattr(scorers, name)(*arguments)
            if name.startswith("start_"):
                result = getattr(scorers, name.replace("start_", "wait_"))()
                channel.send(Reply(result, None, *trace.take(), trace.take_shrunk()), _wait_on)
            line.places.release()
            line.alive()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the engine closed its end or died
    except Exception as error:  # noqa: BLE001 - whatever it was, the engine must hear of it and stop
        traceback.print_exc()
        channel.send(Reply(None, f"{type(error).__name__}: {error}", *trace.take(), trace.take_shrunk()), _wait_on)
