"""A time limit for a user's function on this thread."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE = 1.5  # times the limit, after which a function that ignores interrupts ends its process


class TimeLimitExceeded(BaseException):
    """The limit has passed. No `Exception`, so that the function cannot catch it by accident."""

    @property
    def where(self) -> str:
        """Stack of the interrupted function inside `time_limit`, the outermost call first."""
        inside = traceback.extract_tb(self.__traceback__)[1:-1]  # without the caller of `time_limit`, and without the interrupt
        return " > ".join(f"{call.name} ({os.path.basename(call.filename)}:{call.lineno})" for call in inside)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the block if it does not finish within `seconds`.

    Python code is interrupted, on the main thread only. Code that cannot be interrupted, such as an endless loop in an extension,
    and code on other threads, ends the process after `GRACE` times the limit with status 1 and all stacks on stderr.

    Raises:
        TimeLimitExceeded: the limit has passed.
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
        raise TimeLimitExceeded

    handler = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)  # restore an outer timer, less the time used here
        signal.signal(signal.SIGALRM, handler)
