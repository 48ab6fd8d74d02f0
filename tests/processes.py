"""Whether processes still run."""

from __future__ import annotations

import time

import psutil


def gone(process: psutil.Process) -> bool:
    """Whether it runs no more; a corpse may wait for its parent. It may end while we look."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def still_running(before: set[psutil.Process], patience_s: float = 30.0) -> set[psutil.Process]:
    """Descendants of this process that are not among `before` and do not end; killed ones may take a moment on a busy machine."""
    until = time.monotonic() + patience_s
    while left := {p for p in psutil.Process().children(recursive=True) if p not in before and not gone(p)}:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return left
