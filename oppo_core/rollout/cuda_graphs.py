"""CUDA graphs for decoding: one launch per round, one graph per (rows, columns) shape, with a fallback to eager launches.

A round of a 24-layer network is several hundred kernels, each about as short as the host needs to launch it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

# Eager runs of a shape before its capture: libraries select kernels and allocate workspaces on first use.
WARMUP_RUNS = 2
LOG = logging.getLogger(__name__)

Run = Callable[[int, int], None]


class CudaGraphs:
    """Captures `run(rows, columns)` once per shape and replays it. `run` must read and write the same tensors each time.

    `state` is the tensor that `run` advances; it is restored after warm-up runs. Callers must be on a non-default stream.
    """

    def __init__(self, run: Run, state: Tensor) -> None:
        self._run = run
        self._state = state
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._is_eager = False

    def __call__(self, rows: int, columns: int) -> None:
        """One round over the first `rows` slots, each with fewer than `columns` tokens."""
        if not self._is_eager and (rows, columns) not in self._graphs:
            self._capture(rows, columns)
        if self._is_eager:
            self._run(rows, columns)
        else:
            self._graphs[rows, columns].replay()

    def forget(self) -> None:
        """Drop all graphs, because the weights have moved in memory."""
        self._graphs.clear()

    def _capture(self, rows: int, columns: int) -> None:
        before = self._state.clone()
        try:
            for _ in range(WARMUP_RUNS):
                self._run(rows, columns)
                self._state.copy_(before)
            self._graphs[rows, columns] = self._record_graph(rows, columns)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # for example an operator that synchronizes; which ones do depends on the network
            LOG.warning("decoding launches kernel by kernel: a round cannot be captured as a CUDA graph: %s", error)
            self._graphs.clear()
            self._is_eager = True
            self._state.copy_(before)
            # A failed capture may leave the allocator in capture mode, in which memory cannot be freed.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._state.device.index or 0, self._pool)

    def _record_graph(self, rows: int, columns: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # The outer stream context is needed because a failed capture does not restore the stream. `thread_local`, because the
        # scorers' thread keeps launching and allocating on its own stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            self._run(rows, columns)
        return graph


def graphed_if_cuda(run: Run, state: Tensor) -> Run:
    """`run` itself on a CPU, `CudaGraphs` of it on a GPU."""
    return CudaGraphs(run, state) if state.device.type == "cuda" else run
