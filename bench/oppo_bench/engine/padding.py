"""Batches as a trainer makes them that does not sort: rows in order, all padded to the longest of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

from oppo_core.ppo import retained_forward
from oppo_core.rollout import decoder
from oppo_core.scoring import incremental_prefill

# Who groups rows into passes.
GROUPING = (retained_forward, incremental_prefill, decoder)
NAME = "ragged_batches"


def in_order(lengths: Rows[int], budget: int, columns: Rows[int] | None = None, costs: object = None) -> list[list[int]]:
    """As many rows a pass as the batch's longest allows within `budget` padded tokens; as `ragged_batches` otherwise."""
    rows = [row for row in range(len(lengths)) if lengths[row] > 0]
    width = max(1, budget // max((lengths[row] for row in rows), default=1))
    return [rows[first : first + width] for first in range(0, len(rows), width)]


@contextmanager
def unsorted() -> Iterator[None]:
    """Until the end of the block this process makes its passes by `in_order`."""
    kept = [getattr(module, NAME) for module in GROUPING]
    try:
        for module in GROUPING:
            setattr(module, NAME, in_order)
        yield
    finally:
        for module, function in zip(GROUPING, kept, strict=True):
            setattr(module, NAME, function)
