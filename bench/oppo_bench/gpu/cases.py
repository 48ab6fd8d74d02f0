"""Cases of the GPU benchmark: shapes, batch sizes, variants, and the order of measurement."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from oppo_bench.engine import workload
from oppo_bench.engine.workload import BOTH, SIZES, Lengths, Load, Size

# "tiny" is for a trial on a CPU; the others are the shapes of Qwen2.5 from their config.json files.
SHAPES = {
    "tiny": Size(32, 2, 4, 2, 64, 2048, "qwen2", "float32"),
    "0.5B": SIZES["G1"],
    "1.5B": SIZES["G2"],
    "7B": Size(3584, 28, 28, 4, 18944, 152064, "qwen2", "bfloat16", 4096),
}
UNTIED = ("7B",)  # with an untied head
ADAPTED = ("7B",)  # trained by adapters over one frozen backbone: four copies do not fit on one GPU
SHORT = Lengths(seed=1, median=8, longest=32)
LONG_TAILED = Lengths(seed=1)

# Variants of the engine benchmark without those of two CPU processes; `all` is the most that fits on one GPU.
ON_ONE_GPU = ("padded", "sequential", "per_sequence", "intra", "inter", "both")
VARIANTS: dict[str, dict[str, Any]] = {name: workload.VARIANTS[name] for name in ON_ONE_GPU}
VARIANTS["all"] = BOTH | {"kv_after_update": "keep"}
MEANING = {
    "padded": "sequential PPO as TRL runs it: finished rows idle until the longest ends, passes padded to their batch's longest",
    "sequential": "sequential PPO with continuous batching and sorted passes: no padding waste",
    "per_sequence": "an answer is scored when it has ended, while others decode",
    "intra": "each chunk is read by reward, reference and critic while the actor decodes the next",
    "inter": "the longest answers go on in the next step, nothing is streamed",
    "both": "OPPO: intra and inter",
    "all": "OPPO, and deferred answers keep their cached keys and values when weights change; all their tokens count as stale",
    "vllm": "OPPO, decoded by vLLM in a separate process on the same GPU, which decodes while chunks are scored",
}
VLLM = "vllm"
OVERLAP = VARIANTS | {VLLM: BOTH}
BASE = "sequential"
# Beside `BASE`; the last ones are left out first.
BY_IMPORTANCE = ("both", VLLM, "intra", "inter", "all", "padded", "per_sequence")
SOME = ("padded", BASE, "intra", "both", "all")
FEW = (BASE, "both", "all")


@dataclass(frozen=True, slots=True)
class Cell:
    """One size and batch with its variants."""

    size: str
    batch: int
    variants: tuple[str, ...]
    lengths: Lengths = field(default=LONG_TAILED)
    weight: float = 1.0  # share of the time budget

    @property
    def case(self) -> str:
        """Prefix of its figures' names."""
        return f"{self.size}/B{self.batch}"

    def load(self, device: str) -> Load:
        """The case as the engine benchmark's `Load`. Answers may be two steps old."""
        chunk = 16 if self.lengths is LONG_TAILED else 8
        return Load(self.size, SHAPES[self.size], self.batch, self.lengths, device, max_age=2, chunk=chunk)


# By importance: the last ones are left out first.
ON_GPU = (
    Cell("0.5B", 32, tuple(VARIANTS), weight=3.0),
    Cell("1.5B", 32, SOME, weight=2.0),
    Cell("0.5B", 112, SOME),
    Cell("1.5B", 112, FEW),
    Cell("7B", 32, FEW),
)
# Cases for the options of an update's memory (oppo_bench.engine.memory_options), after the races of the size.
UPDATES = (Cell("tiny", 4, (), SHORT), Cell("0.5B", 32, (), weight=0.6), Cell("1.5B", 32, (), weight=0.6))
TINY = (Cell("tiny", 4, tuple(VARIANTS), SHORT), Cell("tiny", 12, SOME, SHORT))


def select_cells(sizes: list[str], batches: list[int] | None, variants: list[str] | None) -> list[Cell]:
    """Planned cells of these sizes, restricted to `batches` or `variants` if given; `BASE` is always included."""
    wanted = None if variants is None else {*variants, BASE}
    cells = [cell for cell in (*TINY, *ON_GPU) if cell.size in sizes and (batches is None or cell.batch in batches)]
    if wanted is None:
        return cells
    return [replace(c, variants=tuple(v for v in (*c.variants, VLLM) if v in wanted)) for c in cells]


def plan_order(races: list[Cell], updates: bool) -> list[Cell]:
    """Races and measured updates in order: size by size, because networks are built per size."""
    sizes = dict.fromkeys(cell.size for cell in races)
    cells = (*races, *(UPDATES if updates else ()))
    return [cell for size in sizes for cell in cells if cell.size == size]
