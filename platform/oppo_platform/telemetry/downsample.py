"""Fewer points, same picture: every bucket keeps its lowest, its highest and its first non-finite point.

So a spike of a single step stays visible, and a NaN leaves its gap. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST_POINTS = 8


def shown_indices(values: Sequence[float], max_points: int) -> list[int]:
    """Indices of the points to show, ascending: at most `max_points` of them, the first and the last always among them."""
    count = len(values)
    max_points = max(max_points, LEAST_POINTS)
    if count <= max_points:
        return list(range(count))
    buckets = (max_points - 2) // 3
    chosen = {0, count - 1}
    for bucket in range(buckets):
        start, end = bucket * count // buckets, (bucket + 1) * count // buckets
        chosen.update(_extremes(values, start, end))
    return sorted(chosen)


def _extremes(values: Sequence[float], start: int, end: int) -> set[int]:
    lowest = highest = broken = -1
    for index in range(start, end):
        value = values[index]
        if not math.isfinite(value):
            broken = index if broken < 0 else broken
            continue
        if lowest < 0 or value < values[lowest]:
            lowest = index
        if highest < 0 or value > values[highest]:
            highest = index
    return {index for index in (lowest, highest, broken) if index >= 0}
