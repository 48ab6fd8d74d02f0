"""An asyncio event loop in a thread, for vLLM's asynchronous engine; the training loop is synchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from oppo_core.vllm.errors import VllmError

Result = TypeVar("Result")
CLOSE_TIMEOUT_S = 5.0


class AsyncioThread:
    """Runs coroutines for other threads. Thread-safe."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: default limit for one call, seconds. `resources` are released at the end of `close`."""
        self.timeout_s = timeout_s
        self.resources = ExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="oppo-vllm", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result], doing: str, limit_s: float | None = None) -> Result:
        """Run a coroutine and return its result within `limit_s`, by default `timeout_s`.

        Raises:
            VllmError: it raised or timed out; `doing` names the operation in the message.
        """
        future, most_s = self.start(coroutine), limit_s or self.timeout_s
        try:
            return future.result(most_s)
        except TimeoutError as error:
            if future.done():
                raise VllmError(f"vLLM failed at {doing}: {error}") from error
            future.cancel()
            raise VllmError(
                f"vLLM gave no answer for {most_s:g} s at {doing}, so it is assumed to hang (resources.longest_silence_s)"
            ) from None
        except VllmError:
            raise
        except Exception as error:  # vLLM has no common base class of errors
            raise VllmError(f"vLLM failed at {doing}: {type(error).__name__}: {error}") from error

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Schedule a coroutine without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel all coroutines and end the thread."""
        if self._loop.is_closed():
            return
        with self.resources:
            ended = self.start(self._cancel_all())
            # A call that blocks the loop, as a start that took too long, has raised its own error.
            with suppress(TimeoutError):
                ended.result(CLOSE_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _cancel_all(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
