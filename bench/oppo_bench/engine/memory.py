"""How many engines fit into memory at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oppo_contract.spec import RunSpec
from oppo_core.engine.preflight import preflight

MEMINFO = Path("/proc/meminfo")
USABLE = 0.8  # share of free memory; the rest is for other programs


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes that an engine holds between two steps, and those that it needs besides while it works."""

    held: int
    working: int

    @classmethod
    def of(cls, spec: RunSpec) -> EngineMemory:
        """As the check before a run estimates it."""
        items = [item for device in preflight(spec, []).memory for item in device.items]
        working = sum(item.size for item in items if item.name.endswith(": activations"))
        return cls(sum(item.size for item in items) - working, working)

    def of_floor(self, cores: int) -> EngineMemory:
        """Of the floor's measurement: one engine with all cores, and one per core, which work at the same time."""
        return EngineMemory(self.held * (1 + cores), self.working * cores)


def needed(engines: list[EngineMemory]) -> int:
    """Bytes that they need together, if one works at a time."""
    return sum(engine.held for engine in engines) + max(engine.working for engine in engines)


def free_bytes(device: str) -> int | None:
    """Free memory of the device in bytes; None if the system does not report it."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    if not MEMINFO.exists():
        return None
    meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) * 1024


def heats(engines: dict[str, EngineMemory], free: int | None) -> list[list[str]]:
    """Names of engines that are alive together, in order: all of them if `free` bytes suffice."""
    planned: list[list[str]] = []
    for name, engine in engines.items():
        together = [*(engines[other] for other in planned[-1]), engine] if planned else [engine]
        if not planned or (free is not None and needed(together) > USABLE * free):
            planned.append([])
        planned[-1].append(name)
    return planned
