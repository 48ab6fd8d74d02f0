"""Scorers in a child process: they prefill a chunk while the actor decodes the next one.

A process, not a thread: two processes with one pinned thread each overlap at 1.5 to 2 ×, two threads of one process at 1.4 to
1.65 × (measured on two cores). The channel closes when either side exits, so neither outlives the other.

The call queue is bounded: with `QUEUE_SIZE` unfinished calls the actor blocks (backpressure). Every wait in the engine ends with
a reply, with the death of the process, or with a heartbeat timeout. Heartbeats are sent when a call starts or ends, and by
`alive()` within long calls, for example while waiting for a reward service.
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

from oppo_core.models.oom_retry import Shrunk
from oppo_core.scoring.channel import POLL_S, Channel
from oppo_core.scoring.early import EarlyBatch
from oppo_core.scoring.proxy import ScorerProxy
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.trace.recorder import Recorder, Span, Wait

# Not fork: torch's threads and the CUDA driver do not survive it.
START_METHOD: Literal["spawn"] = "spawn"
# Unfinished calls allowed: about the number of chunks per step, so a scorer that catches up by the end causes no stall.
QUEUE_SIZE = 32
# Loading large models from a slow disk and starting vLLM give no heartbeats, so they get at least this long.
LOAD_TIMEOUT_S = 1900.0
SHUTDOWN_TIMEOUT_S = 20.0  # vLLM takes up to 5 s to end
HUNG_SHUTDOWN_TIMEOUT_S = 0.5  # time to write its stack


class ScorerError(RuntimeError):
    """The scorer process failed, died or hangs; the message says which."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a `start_…` call: its result or the fatal error, and the trace records since the last reply."""

    result: object
    error: str | None
    spans: list[Span]
    waits: list[Wait]
    shrunk: list[Shrunk]


class Heartbeat:
    """Shared memory of both processes: time of the last heartbeat, and a semaphore of free queue slots."""

    def __init__(self, context: SpawnContext) -> None:
        self.queue_slots: Semaphore = context.Semaphore(QUEUE_SIZE)
        self._time: Any = context.RawValue("d", 0.0)

    def beat(self) -> None:
        """Record a heartbeat. `time.monotonic` is the same clock in both processes."""
        self._time.value = time.monotonic()

    @property
    def last(self) -> float:
        """`time.monotonic()` of the last heartbeat."""
        return float(self._time.value)


class ProcessScorers(ScorerProxy):
    """A `ScorerProtocol` whose calls run in a child process, in order."""

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
            ScorerError: it failed, died, or did not load within the larger of `LOAD_TIMEOUT_S` and `longest_silence_s`.
        """
        context = multiprocessing.get_context(START_METHOD)
        self._heartbeat = Heartbeat(context)
        self._channel, theirs = Channel.pair()
        # Not daemonic, because a daemon cannot start vLLM's process.
        self._process = context.Process(
            target=_serve, args=(theirs, self._heartbeat, build, devices, threads), name="oppo-scorers"
        )
        self._process.start()
        theirs.close()
        self._trace = trace
        self._sent = time.monotonic()
        self._is_hung = False
        self._longest_silence_s = max(longest_silence_s, LOAD_TIMEOUT_S)
        try:
            self.saves_bytes = cast(int, self._receive())
        except BaseException:
            self.close()
            raise
        self._longest_silence_s = longest_silence_s

    def train_early(self, batch: EarlyBatch) -> None:
        # Supports were sent with the tokens.
        self._send("train_early", replace(batch, sequences=[replace(s, support=[]) for s in batch.sequences]))

    def close(self) -> None:
        """Stop the process; kill it after a timeout."""
        self._channel.close()
        self._process.join(timeout=HUNG_SHUTDOWN_TIMEOUT_S if self._is_hung else SHUTDOWN_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, name: str, *arguments: object) -> None:
        self._acquire_slot()
        self._sent = time.monotonic()
        try:
            self._channel.send((name, arguments), self._check_process)
        except (BrokenPipeError, ConnectionResetError):
            self._raise_exit()

    def _acquire_slot(self) -> None:
        """Block until a queue slot is free; recorded as a stall."""
        if self._heartbeat.queue_slots.acquire(block=False):
            return
        start = self._trace.clock()
        while not self._heartbeat.queue_slots.acquire(timeout=POLL_S):
            self._check_process()
        self._trace.blocked("score", start)

    def _receive(self) -> object:
        try:
            reply = cast(Reply, self._channel.receive(self._check_heartbeat))
        except (EOFError, ConnectionResetError):
            raise self._death_error() from None
        self._trace.spans += reply.spans
        self._trace.waits += reply.waits
        self._trace.shrunk += reply.shrunk
        if reply.error is not None:
            raise ScorerError(reply.error)
        return reply.result

    def _raise_exit(self) -> NoReturn:
        """Raise the error that ended the process, read from the channel if it was sent."""
        self._receive()
        raise ScorerError("the scorer process closed its end of the channel")

    def _check_process(self) -> None:
        """Raises ScorerError when the process is dead or hangs."""
        if not self._process.is_alive():
            self._raise_exit()
        self._check_heartbeat()

    def _check_heartbeat(self) -> None:
        if time.monotonic() - max(self._sent, self._heartbeat.last) > self._longest_silence_s:
            raise self._hang_error()

    def _death_error(self) -> ScorerError:
        self._process.join(timeout=SHUTDOWN_TIMEOUT_S)
        return ScorerError(f"the scorer process died with status {self._process.exitcode}")

    def _hang_error(self) -> ScorerError:
        self._is_hung = True
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGUSR1)  # faulthandler writes its stack to stderr
        return ScorerError(
            f"the scorer process gave no sign of life for {self._longest_silence_s:g} s (resources.longest_silence_s) and is"
            " assumed to hang; its stack is in the log"
        )


def _wait_on() -> None:
    """Wait without a timeout: the channel closes when the engine exits."""


def _serve(
    channel: Channel, heartbeat: Heartbeat, build: Callable[[Recorder], ScorerSet], devices: tuple[str, ...], threads: int
) -> None:
    """Main loop of the child process: sends a reply when ready and to every `start_…` call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the engine handles it
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(threads)
    trace, scorers = Recorder(devices), None
    try:
        scorers = build(trace)
        scorers.alive = heartbeat.beat
        channel.send(Reply(scorers.saves_bytes, None, *trace.take(), trace.take_shrunk()), _wait_on)
        while True:
            name, arguments = cast(Any, channel.receive(_wait_on))
            heartbeat.beat()
            getattr(scorers, name)(*arguments)
            if name.startswith("start_"):
                result = getattr(scorers, name.replace("start_", "wait_"))()
                channel.send(Reply(result, None, *trace.take(), trace.take_shrunk()), _wait_on)
            heartbeat.queue_slots.release()
            heartbeat.beat()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the engine closed its end or died
    except Exception as error:  # noqa: BLE001 - any error is reported to the engine, which stops
        traceback.print_exc()
        channel.send(Reply(None, f"{type(error).__name__}: {error}", *trace.take(), trace.take_shrunk()), _wait_on)
    finally:
        if scorers is not None:
            scorers.close()
