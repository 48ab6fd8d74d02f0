"""CUDA graphs for passes over few tokens: one launch per pass, one graph per shape, with a fallback to eager launches.

A decode step or the reading of a chunk by a 24-layer network is several hundred kernels, each shorter than the host needs to
launch it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from oppo_core.models.protocol import Network

# Eager runs of a shape before its capture: libraries select kernels and allocate workspaces on first use.
WARMUP_RUNS = 1
LOG = logging.getLogger(__name__)

Run = Callable[..., None]
# A capture begins with a synchronization of the device, which would end a capture that another thread has begun; and cached
# memory must not be freed during one.
CAPTURE = threading.Lock()


class CudaGraphs:
    """Captures `run(*shape)` once per shape and replays it. `run` must read and write the same tensors each time.

    `state` is the tensor that `run` advances, if it advances one; it is restored after warm-up runs.
    """

    def __init__(self, run: Run, state: Tensor, network: Network) -> None:
        """`network`: whose weights `run` reads."""
        self._run = run
        self._state = state
        self._network = network
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self._weights = self._addresses()
        self._pool = torch.cuda.graph_pool_handle()
        # Of this device: torch's own stream for captures is of the device that captured first in the process.
        self._stream = torch.cuda.Stream(state.device)  # type: ignore[no-untyped-call]
        self._is_eager = False

    def __call__(self, *shape: int) -> None:
        """One pass of this shape."""
        if not self._is_eager and shape not in self._graphs:
            with CAPTURE:
                self._capture(shape)
        if self._is_eager:
            self._run(*shape)
        else:
            self._graphs[shape].replay()

    def refresh(self) -> None:
        """Drop all graphs if weights have moved in memory since the last call."""
        weights = self._addresses()
        if weights != self._weights:
            self._graphs.clear()
        self._weights = weights

    def _addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self._network.parameters()]

    def _capture(self, shape: tuple[int, ...]) -> None:
        before = self._state.clone()
        if not self._graphs:  # a pool may be gone with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        try:
            for _ in range(WARMUP_RUNS):
                self._run(*shape)
                self._state.copy_(before)
            self._graphs[shape] = self._record_graph(shape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # for example an operator that synchronizes; which ones do depends on the network
            LOG.warning("passes are launched kernel by kernel: one cannot be captured as a CUDA graph: %s", error)
            self._graphs.clear()
            self._is_eager = True
            self._state.copy_(before)
            # A failed capture may leave the allocator in capture mode, in which memory cannot be freed.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._state.device.index or 0, self._pool)

    def _record_graph(self, shape: tuple[int, ...]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # The outer stream context is needed because a failed capture does not restore the stream. `thread_local`, because the
        # other thread, which decodes or scores, keeps launching and allocating on its own stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            self._run(*shape)
        return graph


def graphed_if_cuda(run: Run, state: Tensor, network: Network) -> Run:
    """`run` itself on a CPU, `CudaGraphs` of it on a GPU."""
    return CudaGraphs(run, state, network) if state.device.type == "cuda" else run


@dataclass(frozen=True, slots=True)
class PassShapes:
    """The shapes of captured passes, few because a capture takes as long as some eager passes: `rows`, and columns in steps."""

    rows: tuple[int, ...]
    column_step: int

    def rows_for(self, count: int, slots: int) -> int:
        """The smallest number of rows that holds `count` of at most `slots`."""
        return min(next((rows for rows in self.rows if rows >= count), slots), slots)

    def columns_for(self, longest: int, columns: int) -> int:
        """The smallest number of columns that holds `longest` of at most `columns`."""
        return min(-(-longest // self.column_step) * self.column_step, columns)
