"""Spans of time."""

from __future__ import annotations

Span = tuple[float, float]  # from, to; seconds


def overlap(one: Span, other: Span) -> float:
    """Seconds that two spans have in common."""
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
