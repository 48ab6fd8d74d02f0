"""The scorers in a process of their own: they read a chunk while the actor decodes the next one.

A process, not a thread: two processes of one pinned thread each overlap at 1.5 to 2 ×, two threads of one process at 1.4 to
1.65 × (measured on two cores). The pipe ends with either side, so neither outlives the other.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

import torch

from oppo_core.ppo.critic import CriticUpdate
from oppo_core.scoring.partner import EarlyOrder, LateUpdate, ShareOrder
from oppo_core.scoring.results import Scored
from oppo_core.scoring.scorers import Growth, ScorerSet, Scoring
from oppo_core.trace.recorder import Recorder, Span, Wait

LONGEST_SILENCE_S = 600.0
POLL_S = 1.0


class ScorerError(RuntimeError):
    """The scorer process failed, died or fell silent; the message says which, and how."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to a `start_…`: its result, or the error that ended the process, and the spans since the last answer."""

    result: object
    error: str | None
    spans: list[Span]
    waits: list[Wait]


class RemoteScorers(Scoring):
    """A `Scoring` whose work happens in a child process, in the order in which it was asked for."""

    def __init__(self, build: Callable[[Recorder], ScorerSet], devices: tuple[str, ...], threads: int, trace: Recorder) -> None:
        """Start the process; `build` runs there and must be picklable."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build, devices, threads), name="oppo-scorers", daemon=True)
        self._process.start()
        theirs.close()
        self._trace = trace
        self._receive()

    def begin(self, growths: list[Growth]) -> None:
        """See `Scoring.begin`; returns at once."""
        self._send("begin", growths)

    def extend(self, growths: list[Growth], chunk: int) -> None:
        """See `Scoring.extend`; returns at once."""
        self._send("extend", growths, chunk)

    def start_collect(self, sequence_ids: list[int]) -> None:
        """See `Scoring.start_collect`."""
        with self._trace.span("actor", "score", rows=len(sequence_ids)):
            self._send("start_collect", sequence_ids)

    def start_critic_update(self, update: CriticUpdate) -> None:
        """See `Scoring.start_critic_update`."""
        with self._trace.span("actor", "advantages", rows=len(update.sequence_ids)):
            self._send("start_critic_update", update)

    def release(self, sequence_ids: list[int]) -> None:
        """See `Scoring.release`; returns at once."""
        if sequence_ids:
            self._send("release", sequence_ids)

    def start_save(self, folder: str) -> None:
        """See `Scoring.start_save`."""
        self._send("start_save", folder)

    def wait_collect(self) -> dict[int, Scored]:
        """See `Scoring.wait_collect`. Raises ScorerError when the process failed, died, or was silent for ten minutes."""
        return cast(dict[int, Scored], self._receive())

    def wait_critic_update(self) -> dict[str, float]:
        """See `Scoring.wait_critic_update`. Raises ScorerError, as `wait_collect` does."""
        return cast(dict[str, float], self._receive())

    def train_early(self, order: EarlyOrder) -> None:
        """See `Partnership.train_early`."""
        self._send("train_early", order)

    def start_share(self, order: ShareOrder) -> None:
        """See `Partnership.start_share`."""
        with self._trace.span("actor", "score", rows=len(order.sequence_ids)):
            self._send("start_share", order)

    def wait_share(self) -> dict[int, Scored]:
        """See `Partnership.wait_share`. Raises ScorerError, as `wait_collect` does."""
        return cast(dict[int, Scored], self._receive())

    def start_late_update(self, update: LateUpdate) -> None:
        """See `Partnership.start_late_update`."""
        with self._trace.span("actor", "advantages"):
            self._send("start_late_update", update)

    def wait_late_update(self) -> dict[str, float]:
        """See `Partnership.wait_late_update`. Raises ScorerError, as `wait_collect` does."""
        return cast(dict[str, float], self._receive())

    def wait_save(self) -> None:
        """See `Scoring.wait_save`. Raises ScorerError, as `wait_collect` does."""
        self._receive()

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _send(self, name: str, *arguments: object) -> None:
        try:
            self._connection.send((name, arguments))
        except (BrokenPipeError, ConnectionResetError):
            self._receive()  # the error that ended it is still in the pipe
            raise ScorerError("the scorer process closed its pipe") from None

    def _receive(self) -> object:
        deadline = time.monotonic() + LONGEST_SILENCE_S
        while not self._connection.poll(POLL_S):
            if not self._process.is_alive() and not self._connection.poll():
                raise ScorerError(f"the scorer process died with status {self._process.exitcode}")
            if time.monotonic() > deadline:
                raise ScorerError(f"the scorer process did not answer for {LONGEST_SILENCE_S:.0f} s")
        try:
            reply: Reply = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(timeout=5)
            raise ScorerError(f"the scorer process died with status {self._process.exitcode}") from None
        self._trace.spans += reply.spans
        self._trace.waits += reply.waits
        if reply.error is not None:
            raise ScorerError(reply.error)
        return reply.result


def _serve(connection: Connection, build: Callable[[Recorder], ScorerSet], devices: tuple[str, ...], threads: int) -> None:
    """Body of the process: messages in order, an answer to the first (ready) and to every `start_…`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the engine decides what it means
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(threads)
    trace = Recorder(devices)
    try:
        scorers = build(trace)
        connection.send(Reply(None, None, *trace.take()))
        while True:
            name, arguments = connection.recv()
            getattr(scorers, name)(*arguments)
            if name.startswith("start_"):
                result = getattr(scorers, name.replace("start_", "wait_"))()
                connection.send(Reply(result, None, *trace.take()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the engine closed the pipe or died
    except Exception as error:  # noqa: BLE001 - whatever it was, the engine must hear of it and stop
        traceback.print_exc()
        connection.send(Reply(None, f"{type(error).__name__}: {error}", *trace.take()))
