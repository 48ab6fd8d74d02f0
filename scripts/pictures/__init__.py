"""The drawings of docs/pictures.md: what the engine's own loop does on virtual devices, drawn from the events that it writes.

The same every time: the loop, the pool and the accounting are the engine's, costs and lengths of answers are the ones below
(docs/simulation.md). `make docs` writes the drawings, a test compares them.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DRAWINGS = {"schedules": "schedules", "handover": "handover", "answers": "answers", "engine": "engine"}
STEPS, BATCH, EXTRA, CHUNK = 4, 6, 2, 32
COSTS = {
    "decode": {"round_us": 1000, "row_us": 60},
    "actor": {"token_us": 40, "backward_us": 80},
    "reward": {"token_us": 40},
    "reference": {"token_us": 40},
    "critic": {"token_us": 40, "backward_us": 80},
}
DEVICES = {
    "name": "picture",
    "actor": 1,
    "groups": {"scorers": 1},
    "place": {"reward": "scorers", "reference": "scorers", "critic": "scorers"},
    "costs": COSTS,
    "workload": {"lengths": {"kind": "log-normal", "median": 90, "sigma": 0.7}, "prompt_tokens": 16},
}


@dataclass(frozen=True)
class Told:
    """What a simulated run wrote: the timeline and the metrics of each step."""

    spans: list[dict[str, Any]]
    metrics: list[dict[str, float]]

    @property
    def seconds(self) -> float:
        """From the begin of the first step to the end of the last."""
        return float(self.spans[-1]["window_s"][1] - self.spans[0]["window_s"][0])

    @property
    def tokens(self) -> int:
        """Response tokens that were trained."""
        return int(sum(step["perf/total_num_tokens"] for step in self.metrics))


@cache
def told(schedule: str) -> Told:
    """The first steps under a schedule of `oppo simulate`."""
    from oppo_contract.spec import load_spec
    from oppo_core.simulation.assemble import assemble, steps_of
    from oppo_core.simulation.devices import Devices
    from oppo_core.simulation.schedules import SCHEDULES

    overlap = {**SCHEDULES[schedule], "chunk": {"size": CHUNK, "controller": "fixed"}}
    if overlap["inter_step"] != "off":
        overlap["overcommit"] = {"controller": "fixed", "initial": EXTRA, "min": 0, "max": EXTRA}
    spec = {
        "name": "picture", "steps": STEPS, "seed": 3, "models": {"actor": {"path": "a"}, "reward": {"model": {"path": "r"}}},
        "data": {"prompts": "p"}, "ppo": {"batch_size": BATCH}, "rollout": {"max_new_tokens": 384}, "overlap": overlap,
        "logging": {"samples_per_step": 0},
    }  # fmt: skip
    engine = assemble(load_spec(spec), Devices.model_validate(DEVICES))
    metrics = list(steps_of(engine))
    return Told([payload for kind, payload in engine.journal.events if kind == "spans"], metrics)  # type: ignore[attr-defined]


def drawing(name: str) -> str:
    """A drawing as SVG."""
    made: str = importlib.import_module(f"scripts.pictures.{DRAWINGS[name]}").draw()
    return made


def path_of(name: str) -> Path:
    """Where a drawing is kept."""
    return ROOT / "docs" / "img" / f"{name}.svg"
