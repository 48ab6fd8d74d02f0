"""Sealed blocks of a series: packed points with a pyramid of buckets above them. Pure, on NumPy arrays.

    4,096 points ─▶ 256 buckets of 16 ─▶ 16 buckets of 256 ─▶ the block as one bucket

A bucket keeps the lowest, highest, mean and last finite value of its points and counts the others, so that a spike of one step,
and a NaN, is seen from any distance. Whoever draws asks for as many buckets as the picture has room for (`thinned`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS_A_BLOCK = 4096
FINE, COARSE = 16, 256  # points a bucket
POINTS_BITS = 32  # no bucket has as many points as a number of so many bits can count

Steps = NDArray[np.int32]
Values = NDArray[np.float64]
# One bucket: first and last step, points in it, how many of them are not finite, and what the finite ones are like.
BUCKET = np.dtype(
    [
        ("first", "<i4"), ("last", "<i4"), ("count", "<i4"), ("broken", "<i4"),
        ("low", "<f8"), ("high", "<f8"), ("mean", "<f8"), ("end", "<f8"),
    ]
)  # fmt: skip
Buckets = NDArray[Any]


def pack_points(steps: Steps, values: Values) -> bytes:
    """int32 steps, then float64 values, little-endian: twelve bytes a point."""
    return steps.astype("<i4").tobytes() + values.astype("<f8").tobytes()


def unpack_points(data: bytes | memoryview) -> tuple[Steps, Values]:
    """What `pack_points` packed."""
    count = len(data) // 12
    return np.frombuffer(data, "<i4", count), np.frombuffer(data, "<f8", count, offset=4 * count)


def pack_block(steps: Steps, values: Values) -> tuple[int, bytes]:
    """(stride, data) of sorted points: with equally spaced steps the stride and eight bytes a point, else 0 and twelve."""
    strides = np.diff(steps)
    if len(strides) == 0 or (strides == strides[0]).all():
        return int(strides[0]) if len(strides) else 1, values.astype("<f8").tobytes()
    return 0, pack_points(steps, values)


def unpack_block(first_step: int, stride: int, data: bytes | memoryview) -> tuple[Steps, Values]:
    """What `pack_block` packed."""
    if stride == 0:
        return unpack_points(data)
    values = np.frombuffer(data, "<f8")
    return (first_step + stride * np.arange(len(values))).astype("<i4"), values


def newest(steps: Steps, values: Values) -> tuple[Steps, Values]:
    """Points in ascending order of steps; of several of one step the last one told."""
    if len(steps) < 2 or (steps[1:] > steps[:-1]).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)
    return steps[last], values[last]


def as_buckets(steps: Steps, values: Values) -> Buckets:
    """A bucket for each point."""
    found = np.empty(len(steps), BUCKET)
    finite = np.isfinite(values)
    found["first"] = found["last"] = steps
    found["count"], found["broken"] = 1, ~finite
    for column in ("low", "high", "mean", "end"):
        found[column] = np.where(finite, values, np.nan)
    return found


def merged(buckets: Buckets, starts: NDArray[np.int64]) -> Buckets:
    """Buckets joined to larger ones, each from one of `starts` (ascending, the first 0) up to the next."""
    ends = np.append(starts[1:], len(buckets)) - 1
    known = buckets["count"] - buckets["broken"]
    found = np.empty(len(starts), BUCKET)
    found["first"], found["last"] = buckets["first"][starts], buckets["last"][ends]
    found["count"] = np.add.reduceat(buckets["count"], starts)
    found["broken"] = np.add.reduceat(buckets["broken"], starts)
    found["low"] = np.fmin.reduceat(buckets["low"], starts)
    found["high"] = np.fmax.reduceat(buckets["high"], starts)
    found["mean"] = _means(buckets, known, starts, found)
    # The last finite value: that of the last bucket which has one.
    place = np.maximum.accumulate(np.where(known > 0, np.arange(len(buckets)), -1))[ends]
    found["end"] = np.where(place >= starts, buckets["end"][place], np.nan)
    return found


def _means(buckets: Buckets, known: NDArray[np.int32], starts: NDArray[np.int64], found: Buckets) -> Values:
    """Of each joined bucket the mean of its `known` points, which a float can hold even where it cannot hold their sum.

    They are divided by more than a bucket's points before they are added up: by a power of two, so that nothing is rounded that
    would not be otherwise, but for numbers below 1e-298. What rounding brings beyond the lowest or highest point is that one.
    """
    parts = np.where(known, np.ldexp(buckets["mean"], -POINTS_BITS) * known, 0.0)
    weight = np.add.reduceat(known, starts)
    with np.errstate(over="ignore"):
        means = np.ldexp(np.add.reduceat(parts, starts) / np.maximum(weight, 1), POINTS_BITS)
    return np.where(weight, np.clip(means, found["low"], found["high"]), np.nan)


def every(buckets: Buckets, size: int) -> Buckets:
    """Each `size` buckets joined to one."""
    return merged(buckets, np.arange(0, len(buckets), size))


def pyramid(steps: Steps, values: Values) -> tuple[Buckets, Buckets, Buckets]:
    """Buckets of 16 points, of 256, and of all."""
    fine = every(as_buckets(steps, values), FINE)
    coarse = every(fine, COARSE // FINE)
    return fine, coarse, every(coarse, len(coarse))


def thinned(buckets: Buckets, most: int) -> Buckets:
    """At most `most` buckets that cover the same points, with about as many of the given ones in each."""
    if len(buckets) <= most:
        return buckets
    return merged(buckets, np.arange(most) * len(buckets) // most)


def unpack_buckets(data: bytes | memoryview) -> Buckets:
    """Buckets as they are stored."""
    return np.frombuffer(data, BUCKET)


def joined(parts: Iterable[Buckets]) -> Buckets:
    """Buckets one after the other."""
    found = list(parts)
    return np.concatenate(found) if found else np.empty(0, BUCKET)
