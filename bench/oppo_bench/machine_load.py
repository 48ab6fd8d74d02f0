"""Measures what else runs on the machine: figures from a busy machine mean little."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from pathlib import Path

QUIET_CORES = 0.1  # limit for other programs, as a share of all cores
STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a benchmark. `load`: before it began; `other_cores`: cores that other programs used meanwhile, None if
    unknown."""

    cpus: int
    load: float
    other_cores: float | None

    @property
    def complaint(self) -> str | None:
        """A warning if something else ran."""
        if self.other_cores is not None and self.other_cores > QUIET_CORES * self.cpus:
            return f"Other programs used {self.other_cores:.2f} of {self.cpus} cores meanwhile: do not trust the figures."
        if self.other_cores is None and self.load > QUIET_CORES * self.cpus:
            return f"The load was {self.load:.2f} on {self.cpus} cores before the bench began: was the machine quiet?"
        return None


class LoadMonitor:
    """Measures from its creation on how many cores other programs, and the host of a virtual machine, use."""

    def __init__(self) -> None:
        self.load = os.getloadavg()[0]
        self._start = time.monotonic()
        self._own: dict[int, float] = {}
        self._followed: list[int] = []
        self._busy = _all_busy_s()
        self._first = self._own_s()

    def follow(self, pid: int) -> None:
        """Count a process as ours that `multiprocessing` did not start."""
        self._followed.append(pid)

    def sample(self) -> None:
        """Record the use of our processes; call it before one of them ends."""
        self._own_s()

    def machine(self) -> Machine:
        """The measurements so far."""
        busy = _all_busy_s()
        if busy is None or self._busy is None:
            return Machine(os.cpu_count() or 1, self.load, None)
        others = busy - self._busy - (self._own_s() - self._first)
        return Machine(os.cpu_count() or 1, self.load, max(0.0, others / (time.monotonic() - self._start)))

    def _own_s(self) -> float:
        children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        pids = [os.getpid(), *self._followed, *children]
        self._own |= {pid: used for pid in pids if (used := _used_s(pid)) is not None}
        return sum(self._own.values())


def _all_busy_s() -> float | None:
    """Seconds that all cores have worked since boot, stolen time included; None if /proc is not available."""
    if not STAT.exists():
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _used_s(pid: int) -> float | None:
    """Processor seconds of a process; None if it has ended or /proc is not available."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
