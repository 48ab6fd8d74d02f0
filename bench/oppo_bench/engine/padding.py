"""Batches of a trainer that does not sort: rows in order, all padded to the longest of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager

from oppo_core.models import incremental_prefill
from oppo_core.ppo import retained_forward
from oppo_core.rollout import decoder

# Modules that group rows into passes.
GROUPING = (retained_forward, incremental_prefill, decoder)
NAME = "ragged_batches"


def in_order(lengths: Rows[int], budget: int, columns: Rows[int] | None = None, costs: object = None) -> list[list[int]]:
    """As many rows per pass as the batch's longest allows within `budget` padded tokens; otherwise as `ragged_batches`."""
    rows = [row for row in range(len(lengths)) if lengths[row] > 0]
    width = max(1, budget // max((lengths[row] for row in rows), default=1))
    return [rows[first : first + width] for first in range(0, len(rows), width)]


@contextmanager
def unsorted() -> Iterator[None]:
    """Within the block this process groups rows by `in_order`."""
    kept = [getattr(module, NAME) for module in GROUPING]
    try:
        for module in GROUPING:
            setattr(module, NAME, in_order)
        yield
    finally:
        for module, function in zip(GROUPING, kept, strict=True):
            setattr(module, NAME, function)
