"""Copies between host and device without synchronization.

A plain copy to a GPU waits for the stream; from pinned memory it is queued. Results are copied back together, because each copy
back synchronizes once.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: Tensor | NDArray[np.int64] | list[int], device: torch.device) -> Tensor:
    """`values` of the host on `device`; on a GPU the copy is queued on the current stream."""
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def on_host(rows: Rows[Rows[Tensor]]) -> list[NDArray[np.float64]]:
    """Each row's one-dimensional parts concatenated, as float64 on the host: one copy from the device for all of them."""
    sizes = [sum(len(part) for part in parts) for parts in rows]
    parts = [part for row in rows for part in row]
    joined = torch.cat(parts).double().cpu().numpy() if parts else np.empty(0)
    return np.split(joined, np.cumsum(sizes)[:-1]) if sizes else []
