"""A limit on how long somebody else's function may take, on this thread."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE = 1.5  # times the limit: what does not even take an interrupt by then ends with its process


class TooLong(BaseException):
    """The limit has passed. No `Exception`, so that the function under way cannot take it for a fault of its own."""

    @property
    def where(self) -> str:
        """The calls that were under way inside `at_most`, the outermost first."""
        inside = traceback.extract_tb(self.__traceback__)[1:-1]  # without the caller of `at_most`, and without the interrupt
        return " > ".join(f"{call.name} ({os.path.basename(call.filename)}:{call.lineno})" for call in inside)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End what runs inside when it has not returned within `seconds`.

    Python code is interrupted, on the main thread only. What Python cannot interrupt, such as a sum without end inside an
    extension, and code on other threads, ends the process after `GRACE` times the limit with status 1 and every stack on stderr.

    Raises:
        TooLong: the limit has passed.
    """
    faulthandler.dump_traceback_later(seconds * GRACE, exit=True)
    try:
        if threading.current_thread() is threading.main_thread():
            with _interrupted_after(seconds):
                yield
        else:
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooLong

    handler = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)  # somebody else's clock goes on; ours took little of it
        signal.signal(signal.SIGALRM, handler)
