"""What stands in a cache's place while a transformers model reads whole rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class WholeLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view of a pass that reads whole rows: nothing is kept, and all that there is to see are the row's own keys.

    Without any cache transformers looks at the positions, to find out whether several sequences share a row. That would make
    the host wait for everything that is queued on a GPU, once a pass.
    """

    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Those given."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) of the mask: the tokens of the present pass only."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: nothing was read before."""
        return 0

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1
