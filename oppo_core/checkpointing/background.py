"""Writes a checkpoint in a thread while training goes on (`training.backend: fsdp2`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from oppo_core.models.tensor_files import Writer

Write = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Pending:
    """A checkpoint that is being written, and what is to be done with the result."""

    future: Future[Any]
    report: Callable[[Any], None]


class BackgroundWriter(Writer):
    """Writes from copies in main memory, one checkpoint at a time."""

    def __init__(self) -> None:
        self.given_up = threading.Event()  # `wait` no longer waits
        self.waiting_since: float | None = None  # when training began to `wait` for this checkpoint (`time.monotonic`)
        self._own_part = threading.Event()  # is written, or has failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._parts: list[Write] = []
        self._pending: Pending | None = None

    def copy(self, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Copies in main memory; whole tensors that share memory share their copy. `dtype`: of shards; default: their own."""
        copies: dict[str, Tensor] = {}
        known: dict[tuple[int, torch.Size], Tensor] = {}
        for name, tensor in tensors.items():
            sharded = isinstance(tensor, DTensor)
            key = (0 if sharded else tensor.data_ptr(), tensor.shape)
            if not key[0] or key not in known:
                known[key] = tensor.detach().to("cpu", (dtype if sharded else None) or tensor.dtype, copy=True)
            copies[name] = known[key]
        return copies

    def add(self, write: Write) -> None:
        """Write it in the thread, after `start`."""
        self._parts.append(write)

    def start(self, finish: Callable[[Write], Any], report: Callable[[Any], None]) -> None:
        """Call `finish(write)` in the thread; `write` writes what was added. `wait` calls `report` with its result."""
        parts, self._parts = self._parts, []
        self._own_part.clear()
        self.waiting_since = None

        def write() -> None:
            try:
                while parts:
                    parts.pop(0)()  # and free its copies
            finally:
                self._own_part.set()

        self._pending = Pending(self._thread.submit(finish, write), report)

    @property
    def ready(self) -> bool:
        return self._pending is not None and self._pending.future.done()

    @property
    def failure(self) -> BaseException | None:
        return self._pending.future.exception() if self._pending is not None and self.ready else None

    def wait(self, others_s: float | None = None) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self.waiting_since = time.monotonic()
        if others_s is not None:
            self._own_part.wait()
            if not wait([pending.future], others_s).done:
                self.given_up.set()
        pending.report(pending.future.result())
