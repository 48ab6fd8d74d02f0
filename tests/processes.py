"""Whether processes still run."""

from __future__ import annotations

import psutil


def gone(process: psutil.Process) -> bool:
    """Whether it runs no more; a corpse may wait for its parent. It may end while we look."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
