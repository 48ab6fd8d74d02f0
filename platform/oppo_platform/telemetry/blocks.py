"""Byte formats of a series: points (also of hot rows), and blocks with a pyramid of buckets. Pure, on NumPy arrays.

    4,096 points ─▶ 256 buckets of 16 ─▶ 16 buckets of 256 ─▶ the block as one bucket

A bucket has the minimum, maximum, mean and last finite value of its points and counts the others, so that a spike of one step,
and a NaN, is visible at every zoom level. `downsample` returns as many buckets as a chart has room for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS_A_BLOCK = 4096
FINE, COARSE = 16, 256  # points per bucket
POINTS_BITS = 32  # no bucket has more points than a number of this many bits

Steps = NDArray[np.int32]
Values = NDArray[np.float64]
# One bucket: first and last step, number of points, number of non-finite points, and statistics of the finite ones.
BUCKET = np.dtype(
    [
        ("first", "<i4"), ("last", "<i4"), ("count", "<i4"), ("broken", "<i4"),
        ("low", "<f8"), ("high", "<f8"), ("mean", "<f8"), ("end", "<f8"),
    ]
)  # fmt: skip
Buckets = NDArray[Any]


def pack_points(steps: Steps, values: Values) -> bytes:
    """int32 steps, then float64 values, little-endian: twelve bytes per point."""
    return steps.astype("<i4").tobytes() + values.astype("<f8").tobytes()


def unpack_points(data: bytes | memoryview) -> tuple[Steps, Values]:
    """Inverse of `pack_points`."""
    count = len(data) // 12
    return np.frombuffer(data, "<i4", count), np.frombuffer(data, "<f8", count, offset=4 * count)


def pack_block(steps: Steps, values: Values) -> tuple[int, bytes]:
    """(stride, data) of sorted points: with equally spaced steps the stride and eight bytes per point, otherwise 0 and twelve."""
    strides = np.diff(steps)
    if len(strides) == 0 or (strides == strides[0]).all():
        return int(strides[0]) if len(strides) else 1, values.astype("<f8").tobytes()
    return 0, pack_points(steps, values)


def unpack_block(first_step: int, stride: int, data: bytes | memoryview) -> tuple[Steps, Values]:
    """Inverse of `pack_block`."""
    if stride == 0:
        return unpack_points(data)
    values = np.frombuffer(data, "<f8")
    return (first_step + stride * np.arange(len(values))).astype("<i4"), values


def sort_by_step(steps: Steps, values: Values) -> tuple[Steps, Values]:
    """Points in ascending order of steps; of several points of one step the last reported one."""
    if len(steps) < 2 or (steps[1:] > steps[:-1]).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)
    return steps[last], values[last]


def as_buckets(steps: Steps, values: Values) -> Buckets:
    """One bucket per point."""
    result = np.empty(len(steps), BUCKET)
    finite = np.isfinite(values)
    result["first"] = result["last"] = steps
    result["count"], result["broken"] = 1, ~finite
    for column in ("low", "high", "mean", "end"):
        result[column] = np.where(finite, values, np.nan)
    return result


def merge_from(buckets: Buckets, starts: NDArray[np.int64]) -> Buckets:
    """Buckets merged into larger ones, each from one of `starts` (ascending, the first 0) up to the next."""
    ends = np.append(starts[1:], len(buckets)) - 1
    known = buckets["count"] - buckets["broken"]
    result = np.empty(len(starts), BUCKET)
    result["first"], result["last"] = buckets["first"][starts], buckets["last"][ends]
    result["count"] = np.add.reduceat(buckets["count"], starts)
    result["broken"] = np.add.reduceat(buckets["broken"], starts)
    result["low"] = np.fmin.reduceat(buckets["low"], starts)
    result["high"] = np.fmax.reduceat(buckets["high"], starts)
    result["mean"] = _means(buckets, known, starts, result)
    # The last finite value is that of the last bucket with one.
    place = np.maximum.accumulate(np.where(known > 0, np.arange(len(buckets)), -1))[ends]
    result["end"] = np.where(place >= starts, buckets["end"][place], np.nan)
    return result


def _means(buckets: Buckets, known: NDArray[np.int32], starts: NDArray[np.int64], result: Buckets) -> Values:
    """Mean of the `known` points of each merged bucket, also where their sum overflows a float.

    Points are divided by a power of two above their number before they are added, which rounds only numbers below 1e-298. A
    mean that rounding moves beyond the minimum or maximum is clipped.
    """
    parts = np.where(known, np.ldexp(buckets["mean"], -POINTS_BITS) * known, 0.0)
    weight = np.add.reduceat(known, starts)
    with np.errstate(over="ignore"):
        means = np.ldexp(np.add.reduceat(parts, starts) / np.maximum(weight, 1), POINTS_BITS)
    return np.where(weight, np.clip(means, result["low"], result["high"]), np.nan)


def merge_every(buckets: Buckets, size: int) -> Buckets:
    """Every `size` buckets merged into one."""
    return merge_from(buckets, np.arange(0, len(buckets), size))


def pyramid(steps: Steps, values: Values) -> tuple[Buckets, Buckets, Buckets]:
    """Buckets of 16 points, of 256, and of all."""
    fine = merge_every(as_buckets(steps, values), FINE)
    coarse = merge_every(fine, COARSE // FINE)
    return fine, coarse, merge_every(coarse, len(coarse))


def downsample(buckets: Buckets, most: int) -> Buckets:
    """At most `most` buckets that cover the same points, with about equally many of the given ones in each."""
    if len(buckets) <= most:
        return buckets
    return merge_from(buckets, np.arange(most) * len(buckets) // most)


def unpack_buckets(data: bytes | memoryview) -> Buckets:
    """Stored buckets as an array."""
    return np.frombuffer(data, BUCKET)
