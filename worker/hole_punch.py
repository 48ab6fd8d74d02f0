"""Giving the beginning of a file back to the disk while somebody appends to its end: offsets stay, the bytes become a hole.

On Linux, and on file systems that can (ext4, xfs, btrfs, tmpfs). Elsewhere the file keeps its size, and nothing else changes.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import IO

KEEP_SIZE, PUNCH_HOLE = 0x01, 0x02


def punch(path: os.PathLike[str], until: int) -> bool:
    """Let the file's first `until` bytes go. Returns whether that was possible."""
    if sys.platform != "linux" or until <= 0:
        return False
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    descriptor = os.open(path, os.O_RDWR)
    try:
        return bool(fallocate(descriptor, KEEP_SIZE | PUNCH_HOLE, 0, until) == 0)
    finally:
        os.close(descriptor)


def first_data(content: IO[bytes]) -> int:
    """Where the file's content begins behind a hole; within the first block there may still be zeros in front of it."""
    if sys.platform != "linux":
        return 0
    try:
        return os.lseek(content.fileno(), 0, os.SEEK_DATA)
    except OSError:  # empty, or all hole
        return 0
