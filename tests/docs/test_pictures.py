"""The drawings of docs/pictures.md are self-contained, and the page's percentages are those of the simulation that they show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from oppo_contract.spec import load_spec
from oppo_core.simulation.assemble import assemble, steps_of
from oppo_estimate.devices import Devices
from oppo_estimate.schedules import SCHEDULES

DOCS = Path(__file__).parents[2] / "docs"
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
class Simulated:
    """The timeline and the metrics of each step of a simulated run."""

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


def simulated(schedule: str) -> Simulated:
    """The run of the drawings under a schedule of `oppo simulate`."""
    overlap = {**SCHEDULES[schedule], "chunk": {"size": 32, "controller": "fixed"}}
    if overlap["inter_step"] != "off":
        overlap["overcommit"] = {"controller": "fixed", "initial": 2, "min": 0, "max": 2}
    spec = {
        "name": "picture", "steps": 4, "seed": 3, "models": {"actor": {"path": "a"}, "reward": {"model": {"path": "r"}}},
        "data": {"prompts": "p"}, "ppo": {"batch_size": 6}, "rollout": {"max_new_tokens": 384}, "overlap": overlap,
        "logging": {"samples_per_step": 0},
    }  # fmt: skip
    engine = assemble(load_spec(spec), Devices.model_validate(DEVICES))
    metrics = list(steps_of(engine))
    return Simulated([payload for kind, payload in engine.journal.events if kind == "spans"], metrics)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["schedules", "handover", "answers", "engine"])
def test_a_drawing_has_a_title_and_loads_nothing(name: str) -> None:
    text = (DOCS / "img" / f"{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert root.find("{*}title") is not None
    assert root.find("{*}desc") is not None
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_percentages_on_the_page_match_the_simulation() -> None:
    page = (DOCS / "pictures.md").read_text(encoding="utf-8")
    by_name = {name: simulated(name) for name in ("sequential", "intra", "both")}
    for name, run in by_name.items():
        seconds = [step["window_s"][1] - step["window_s"][0] for step in run.spans]
        idle = {
            device: sum(s * step[f"bubble/{device}"] for s, step in zip(seconds, run.metrics, strict=True)) / sum(seconds)
            for device in ("gpu:0", "gpu:1")
        }
        if name != "both":
            assert f"idle {100 * idle['gpu:0']:.0f} %" in " ".join(page.split())
            assert f"{100 * idle['gpu:1']:.0f} %" in page
        else:
            assert f"{1e6 * run.seconds / run.tokens:.0f} µs per trained token" in " ".join(page.split())
    # Streaming changes when, and not what.
    tokens = [[step["perf/total_num_tokens"] for step in by_name[name].metrics] for name in ("sequential", "intra")]
    assert tokens[0] == tokens[1]
