"""CPU seconds of a rank's processes. `busy` is the wall time of spans, which includes waiting for a core on a shared machine."""

from __future__ import annotations

import os

try:
    import psutil
except ImportError:  # bench/gpu runs with torch, transformers and pydantic alone
    psutil = None  # type: ignore[assignment]


class CpuTime:
    """CPU seconds, user and system, of this process and its descendants; without psutil of those that have ended."""

    def __init__(self) -> None:
        self._process = None if psutil is None else psutil.Process()
        self._before = self._total()

    def take(self) -> dict[str, float]:
        """Metric `perf/cpu_s`: CPU seconds since the last call."""
        before, self._before = self._before, self._total()
        return {"perf/cpu_s": max(0.0, self._before - before)}

    def _total(self) -> float:
        if self._process is None:
            return sum(os.times()[:4])
        total = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:  # it has just ended: its parent's `children_…` include it
                continue
            total += times.user + times.system + times.children_user + times.children_system
        return total
