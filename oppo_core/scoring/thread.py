"""Scorers on a GPU (the actor's or another): a thread launches their work on a separate CUDA stream.

Decoding and scoring are both launch-bound. With one launching thread, no decode step would start while a chunk's prefill is
launched. torch releases the GIL in every operator, so two threads alternate and the device runs what either has queued. Inputs
and results of the scorers go through the host, so the two streams never wait for each other.

The call queue is bounded as in `scoring/process.py`, and a wait ends likewise: with a reply, the thread's error, or a heartbeat
timeout.
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

from oppo_core.models.oom_retry import Shrunk
from oppo_core.scoring.channel import POLL_S
from oppo_core.scoring.process import QUEUE_SIZE, SHUTDOWN_TIMEOUT_S, ScorerError
from oppo_core.scoring.proxy import ScorerProxy
from oppo_core.scoring.scorers import ScorerSet
from oppo_core.trace.recorder import Recorder, Span, Wait


@dataclass(frozen=True, slots=True)
class ThreadReply:
    """Result of a `start_…` call, and the trace records since the last reply."""

    result: object
    spans: list[Span]
    waits: list[Wait]
    shrunk: list[Shrunk]


class ThreadedScorers(ScorerProxy):
    """A `ScorerProtocol` whose calls run in a thread of this process, in order."""

    def __init__(
        self,
        build: Callable[[Recorder], ScorerSet],
        recorder: Recorder,
        device: torch.device,
        trace: Recorder,
        longest_silence_s: float,
    ) -> None:
        """Call `build(recorder)` in the calling thread; `recorder` then belongs to the new thread. On a CPU there is no stream.

        Exceptions of `build` propagate.
        """
        self._trace = trace
        self._longest_silence_s = longest_silence_s
        self._stream = side_stream(device)
        with self._stream():
            self._scorers = build(recorder)
        self._scorers.alive = self._beat
        self.saves_bytes = self._scorers.saves_bytes
        self._calls: queue.Queue[tuple[str, tuple[object, ...]] | None] = queue.Queue(QUEUE_SIZE)
        self._replies: queue.SimpleQueue[ThreadReply] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._is_closing = False
        self._last_beat = time.monotonic()
        self._thread = threading.Thread(target=self._serve, name="oppo-scorers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and drop queued calls. A hung thread is abandoned and ends with the process."""
        self._is_closing = True
        try:
            self._calls.put(None, timeout=SHUTDOWN_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(timeout=SHUTDOWN_TIMEOUT_S)

    def _send(self, name: str, *arguments: object) -> None:
        self._raise_error()
        if self._calls.full():
            start = self._trace.clock()
            self._put_blocking(name, arguments)
            self._trace.blocked("score", start)
        else:
            self._calls.put((name, arguments))  # there is no other producer, so the slot is still free

    def _put_blocking(self, name: str, arguments: tuple[object, ...]) -> None:
        while True:
            try:
                return self._calls.put((name, arguments), timeout=POLL_S)
            except queue.Full:
                self._check_heartbeat()

    def _receive(self) -> object:
        sent = time.monotonic()
        while True:
            self._raise_error()
            try:
                reply = self._replies.get(timeout=POLL_S)
            except queue.Empty:
                self._check_heartbeat(sent)
                continue
            self._raise_error()
            self._trace.spans += reply.spans
            self._trace.waits += reply.waits
            self._trace.shrunk += reply.shrunk
            return reply.result

    def _raise_error(self) -> None:
        if self._error is not None:
            raise ScorerError(f"{type(self._error).__name__}: {self._error}") from self._error

    def _beat(self) -> None:
        self._last_beat = time.monotonic()

    def _check_heartbeat(self, sent: float = 0.0) -> None:
        if time.monotonic() - max(sent, self._last_beat) > self._longest_silence_s:
            faulthandler.dump_traceback(all_threads=True)
            raise ScorerError(
                f"the scorers' thread gave no sign of life for {self._longest_silence_s:g} s (resources.longest_silence_s) and is"
                " assumed to hang; its stack is in the log"
            )

    def _serve(self) -> None:
        """Main loop of the thread. After an error, calls are still taken from the queue but not run."""
        with self._stream():
            while (call := self._calls.get()) is not None:
                self._beat()
                if self._error is None and not self._is_closing:
                    self._execute(*call)
                self._beat()
            self._scorers.close()

    def _execute(self, name: str, arguments: tuple[object, ...]) -> None:
        try:
            getattr(self._scorers, name)(*arguments)
            if name.startswith("start_"):
                result = getattr(self._scorers, name.replace("start_", "wait_"))()
                trace = self._scorers.trace
                self._replies.put(ThreadReply(result, *trace.take(), trace.take_shrunk()))
        except Exception as error:  # noqa: BLE001 - any error is reported to the engine, which stops
            traceback.print_exc()
            self._error = error
            self._replies.put(ThreadReply(None, [], [], []))  # wakes a blocked `_receive`


def side_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """A context manager that launches on a new CUDA stream, ordered after the work queued so far. No-op on a CPU."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return lambda: torch.cuda.stream(stream)
