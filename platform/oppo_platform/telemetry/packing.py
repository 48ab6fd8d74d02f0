"""Points as bytes: int32 steps and float64 values, little-endian. NaN and infinities are kept."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable


def pack_steps(steps: Iterable[int]) -> bytes:
    """Four bytes a step."""
    return _little(array("i", steps))


def pack_values(values: Iterable[float]) -> bytes:
    """Eight bytes a value."""
    return _little(array("d", values))


def unpack_steps(data: bytes | memoryview) -> array[int]:
    """What `pack_steps` packed."""
    return _native(array("i"), data)


def unpack_values(data: bytes | memoryview) -> array[float]:
    """What `pack_values` packed."""
    return _native(array("d"), data)


def _little(numbers: array) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _native(numbers: array, data: bytes | memoryview) -> array:
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
