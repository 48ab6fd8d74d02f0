"""CPU seconds and resident memory, now and at its peak, of a rank's processes.

`busy` is the wall time of spans, which includes waiting for a core on a shared machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

try:
    import psutil
except ImportError:  # bench/gpu runs with torch, transformers and pydantic alone
    psutil = None  # type: ignore[assignment]

GB = 10**9
Value = TypeVar("Value")


class CpuTime:
    """CPU seconds, user and system, of this process and its descendants; without psutil of those that have ended.

    With `memory` and psutil also their resident memory.
    """

    def __init__(self, memory: bool = False) -> None:
        self._memory = memory
        self._process = None if psutil is None else psutil.Process()
        self._before = self._total()

    def take(self) -> dict[str, float]:
        """Metrics `perf/cpu_s`: CPU seconds since the last call; `perf/rss_gb`, `perf/max_rss_gb`: resident now and at most.

        In GB. The peak is the sum of each process's own. Only Linux reports it, and shared memory, which counts once.
        """
        before, self._before = self._before, self._total()
        metrics = {"perf/cpu_s": max(0.0, self._before - before)}
        if self._memory and self._process is not None:
            now, peaks, shared = zip(*self._each(_resident), strict=True)
            twice = sum(shared) - max(shared)  # the weights that all of them map
            metrics["perf/rss_gb"] = (sum(now) - twice) / GB
            if any(peaks):
                metrics["perf/max_rss_gb"] = (sum(peaks) - twice) / GB
        return metrics

    def _total(self) -> float:
        def cpu_s(process: psutil.Process) -> float:
            times = process.cpu_times()
            return float(times.user + times.system + times.children_user + times.children_system)

        return sum(os.times()[:4]) if self._process is None else sum(self._each(cpu_s))

    def _each(self, read: Callable[[psutil.Process], Value]) -> list[Value]:
        """Of this process and its descendants. One that has just ended is skipped: its parent's times include it."""
        assert self._process is not None
        values = []
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                values.append(read(process))
        return values


def _resident(process: psutil.Process) -> tuple[int, int, int]:
    """A process's resident memory, its peak, and how much of it is shared, bytes."""
    return process.memory_info().rss, status_bytes(process.pid, "VmHWM"), status_bytes(process.pid, "RssShmem")


def status_bytes(pid: int, name: str) -> int:
    """A size in Linux's /proc/PID/status in bytes, such as VmHWM (peak resident memory); 0 where it cannot be read."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return 0
