"""One round of decoding as one launch: CUDA graphs a shape, and the plain way where a round cannot be captured.

A round of a network with 24 layers is some hundred kernels, each as short as the time that the host needs to launch it.
Captured once a shape, all of them are launched together, and the host has time for everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

# So often a shape is run before it is captured: libraries choose kernels and allocate workspaces when they see it first.
WARM_UPS = 2
LOG = logging.getLogger(__name__)

Run = Callable[[int, int], None]


class Graphs:
    """Calls `run(rows, columns)`, which reads and writes the same tensors each time, by replaying what it launched once.

    `state` is what `run` advances: it is put back after running only to warm up. Whoever calls has a stream of its own.
    """

    def __init__(self, run: Run, state: Tensor) -> None:
        self._run = run
        self._state = state
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._is_plain = False

    def __call__(self, rows: int, columns: int) -> None:
        """One round over the first `rows` slots, none of which has `columns` tokens or more."""
        if not self._is_plain and (rows, columns) not in self._graphs:
            self._capture(rows, columns)
        if self._is_plain:
            self._run(rows, columns)
        else:
            self._graphs[rows, columns].replay()

    def forget(self) -> None:
        """Capture anew: the weights lie elsewhere now."""
        self._graphs.clear()

    def _capture(self, rows: int, columns: int) -> None:
        before = self._state.clone()
        try:
            for _ in range(WARM_UPS):
                self._run(rows, columns)
                self._state.copy_(before)
            self._graphs[rows, columns] = self._captured(rows, columns)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operator that waits for the device, say; which ones do depends on the network
            LOG.warning("decoding launches kernel by kernel: a round cannot be captured as a CUDA graph: %s", error)
            self._graphs.clear()
            self._is_plain = True
            self._state.copy_(before)
            # A capture that fails may leave the allocator in the belief that it goes on; then memory could not be given back.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._state.device.index or 0, self._pool)

    def _captured(self, rows: int, columns: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Entered besides: a capture that fails does not leave its stream by itself. It is of this thread only, because the
        # scorers' thread goes on launching, and allocating, on its own stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            self._run(rows, columns)
        return graph


def round_of(run: Run, state: Tensor) -> Run:
    """`run` itself on a CPU, and on a GPU its `Graphs`."""
    return Graphs(run, state) if state.device.type == "cuda" else run
