"""An asyncio loop in a thread of its own: vLLM's engine in another process speaks asyncio, the training loop does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from oppo_core.vllm.errors import VllmError

Result = TypeVar("Result")
ENDS_WITHIN_S = 5.0


class Loop:
    """Runs coroutines for other threads, any of which may ask at the same time."""

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: how long an answer may take, seconds."""
        self.silence_s = silence_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="oppo-vllm", daemon=True)
        self._thread.start()

    def run(self, what: Coroutine[Any, Any, Result], doing: str, patience_s: float | None = None) -> Result:
        """Wait for what comes of it, `patience_s` or as long as everything may take.

        Raises:
            VllmError: it raised, or took too long; `doing` says at what.
        """
        future, most_s = self.start(what), patience_s or self.silence_s
        try:
            return future.result(most_s)
        except TimeoutError as error:
            if future.done():
                raise VllmError(f"vLLM failed at {doing}: {error}") from error
            future.cancel()
            raise VllmError(
                f"vLLM gave no answer for {most_s:g} s at {doing}, so it is taken for hung (resources.longest_silence_s)"
            ) from None
        except VllmError:
            raise
        except Exception as error:  # its own kinds of errors, of which we know no list
            raise VllmError(f"vLLM failed at {doing}: {type(error).__name__}: {error}") from error

    def start(self, what: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Let it run beside others."""
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    def close(self) -> None:
        """Cancel whatever still runs, and end the thread."""
        if self._loop.is_closed():
            return
        ended = self.start(self._cancel_all())
        try:
            ended.result(ENDS_WITHIN_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(ENDS_WITHIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
