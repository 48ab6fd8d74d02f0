"""How many engines fit into memory at the same time."""

from __future__ import annotations

from pathlib import Path

from oppo_bench.engine.workload import FLOOR, Load

MEMINFO = Path("/proc/meminfo")
USABLE = 0.8  # share of free memory; the rest is for activations and other programs
SECOND_NUMBERS = {"float32": 0, "bfloat16": 6}  # bytes per trained weight: a float32 copy, and the gradient in float32


def engine_bytes(load: Load) -> int:
    """Memory of one engine between two steps: four networks, two optimizers, four caches of B+Δ rows, shared gradients.

    A published model's adapters are small, and its actor without them is the reference.
    """
    size, adapted = load.size, load.model is not None
    width = 2 if size.dtype == "bfloat16" else 4
    weights = size.parameters * (3 if adapted else 4) * width
    trained = 0 if adapted else size.parameters * 2 * (width + 8 + SECOND_NUMBERS[size.dtype])  # gradient and two moments
    early = 0 if adapted or load.device == "cuda" else size.parameters * 2 * width
    token = size.layers * 2 * size.key_heads * (size.hidden // size.heads) * width
    return weights + trained + early + 4 * (load.batch + load.overcommit) * load.context * token


def free_bytes(device: str) -> int | None:
    """Free memory of the device in bytes; None if the system does not report it."""
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
    if not MEMINFO.exists():
        return None
    meminfo = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) * 1024


def heats(names: list[str], load: Load, threads: int) -> list[list[str]]:
    """Variants that are alive together, in order: all of them if memory allows. The floor has one more engine per core."""
    free = free_bytes(load.device)
    if free is None:
        return [names]
    one, planned, left = engine_bytes(load), list[list[str]](), 0.0
    for name in names:
        needed = one * (1 + threads if name == FLOOR and load.device == "cpu" else 1)
        if not planned or needed > left:
            planned.append([])
            left = USABLE * free
        planned[-1].append(name)
        left -= needed
    return planned
