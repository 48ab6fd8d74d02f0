"""Reading of chunks in few shapes, each a CUDA graph: rows and tokens are padded.

A GPU computes the padding in less time than the host takes to launch a pass kernel by kernel (docs/measurements/2026-11-27.md).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo_core.models.cache import SlotCache
from oppo_core.models.cuda_graphs import CudaGraphs, PassShapes, graphed_if_cuda
from oppo_core.models.host_device import to_device
from oppo_core.models.protocol import Network

SHAPES = PassShapes((8, 16, 32, 48, 64, 96, 128, 192, 256), column_step=256)
# Tokens per row. A pass with longer new parts has enough work for its kernels to be launched one by one.
WIDTHS = (16, 32)
WIDEST = WIDTHS[-1]


class GraphedReads:
    """Passes over new tokens of continued sequences in `cache`, whose last slot is reserved for padding rows."""

    def __init__(self, network: Network, cache: SlotCache, device: torch.device) -> None:
        self._network = network
        self._cache = cache
        self._device = device
        rows = cache.slots - 1
        self._slots = torch.zeros(rows, dtype=torch.long, device=device)
        self._inputs = torch.zeros(2, rows, WIDEST, dtype=torch.long, device=device)  # tokens and their positions
        self._hidden: Tensor | None = None
        self._run = graphed_if_cuda(self._pass, self._inputs, network)

    def refresh(self) -> None:
        """To be called before reads: the network's weights may have been replaced."""
        if isinstance(self._run, CudaGraphs):
            self._run.refresh()

    def padded_tokens(self, new: list[NDArray[np.int64]]) -> int | None:
        """Tokens of the pass that reads these, padding included; None: their parts are too long for one."""
        width = next((width for width in WIDTHS if width >= max(map(len, new))), None)
        return None if width is None else width * SHAPES.rows_for(len(new), len(self._slots))

    def read(self, slots: list[int], starts: list[int], new: list[NDArray[np.int64]]) -> Tensor:
        """Hidden states [N, T, H], right-padded, of the `new` tokens, whose positions begin at `starts`."""
        count, longest = len(new), max(map(len, new))
        rows, width = SHAPES.rows_for(count, len(self._slots)), next(width for width in WIDTHS if width >= longest)
        spare, spare_column = self._cache.slots - 1, self._cache.columns - 1
        inputs = np.zeros((2, rows, width), dtype=np.int64)
        for row, tokens in enumerate(new):
            inputs[0, row, : len(tokens)] = tokens
        inputs[1, :count] = np.minimum(np.asarray(starts)[:, None] + np.arange(width), spare_column)
        columns = SHAPES.columns_for(int(inputs[1].max()) + 1, self._cache.columns)
        self._slots[:rows].copy_(to_device([*slots, *[spare] * (rows - count)], self._device))
        self._inputs[:, :rows, :width].copy_(to_device(torch.from_numpy(inputs), self._device))
        self._run(rows, width, columns)
        assert self._hidden is not None
        return self._hidden[:count, :width].clone()  # the next pass overwrites it

    def _pass(self, rows: int, width: int, columns: int) -> None:
        tokens_NT, places_NT = self._inputs[:, :rows, :width]
        window = self._cache.window(self._slots[:rows], places_NT, columns)
        hidden = self._network.hidden(tokens_NT, places_NT.clamp_max(self._cache.columns - 2), window)
        if self._hidden is None:  # allocated by the eager warm-up, outside the graphs' memory
            self._hidden = hidden.new_zeros(len(self._slots), WIDEST, hidden.shape[-1])
        self._hidden[:rows, :width] = hidden
