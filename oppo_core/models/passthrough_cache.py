"""A cache stand-in for passes over whole rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class WholeLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a pass over whole rows: nothing is stored, and a row attends to its own keys only.

    Without any cache transformers inspects the positions for packed sequences, which synchronizes with the GPU once per
    pass.
    """

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The given keys and values."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) of the mask: the tokens of this pass only."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: nothing was read before."""
        return 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1
