"""In which precision numbers are added up, whatever the weights are stored in."""

from __future__ import annotations

import torch
from torch import Tensor


def precise(values: Tensor) -> Tensor:
    """The same values in float32 at least: log-probs of a whole vocabulary need more than bfloat16's eight bits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
