"""The cost of a tracker: `python bench/trackers_cost.py [--mlflow URI] [--wandb] [--json FILE] [--steps N]`

Trains the run of `oppo_bench.telemetry.logging_cost` (hidden 128, 16 answers, four samples per step) once for each tracker,
TensorBoard always, and measures processor time and memory of the tracker's process. The engine itself does no tracker work
in a step. MLflow needs a server (`--mlflow`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from oppo_bench.telemetry.logging_cost import build_spec
from oppo_contract.spec import load_spec
from oppo_core.engine.build import assemble
from oppo_core.engine.state import Engine
from oppo_core.reporting.event_log import Journal
from oppo_core.trackers.manager import Trackers
from oppo_core.train import train

LEFT_OUT = 5  # steps in which the tracker's process may still be starting
FLUSH_S = 120.0


@dataclass(slots=True)
class Watch:
    """Samples a tracker's process tree at every check of the engine for a stop request."""

    engine: Engine
    process: psutil.Process
    looks: list[tuple[int, float, int]] = field(default_factory=list)  # steps done, processor seconds, bytes

    def should_stop(self) -> bool:
        """Always false; samples once per step."""
        step = self.engine.progress.step
        if step >= LEFT_OUT and (not self.looks or step > self.looks[-1][0]):
            family = [self.process, *self.process.children(recursive=True)]
            times = [each.cpu_times() for each in family]
            used = sum(each.user + each.system for each in times)
            self.looks.append((step, used, sum(each.memory_info().rss for each in family)))
        return False


def measure(section: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Rows of the benchmark format for one tracker."""
    tree = build_spec(steps)
    tree["logging"]["trackers"] = {**section, "flush_s": FLUSH_S}
    spec = load_spec(tree)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(64)))
        journal = Journal(folder / "events.jsonl")
        trackers = Trackers(journal)
        trackers.start(spec, folder)
        engine = assemble(spec, [folder], folder, journal)
        watch = Watch(engine, psutil.Process(trackers.processes[0].process.pid))
        try:
            train(engine, watch.should_stop)
        finally:
            engine.scorers.close()
            trackers.close("succeeded", steps)
            journal.close()
    (first, before, _), (last, after, size) = watch.looks[0], watch.looks[-1]
    tracker = next(iter(section))
    return [
        row(f"{tracker}/process_ms_a_step", "ms", 1e3 * (after - before) / (last - first), last - first),
        row(f"{tracker}/process_mib", "MiB", size / 2**20, 1),
    ]


def row(name: str, unit: str, value: float, n: int) -> dict[str, Any]:
    """One result, over `n` steps."""
    return {"name": name, "unit": unit, "median": value, "min": value, "max": value, "n": n}


def main() -> None:
    """Measure, print a table, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mlflow", metavar="URI")
    parser.add_argument("--wandb", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    sections: list[dict[str, Any]] = [{"tensorboard": {}}]
    sections += [{"mlflow": {"uri": options.mlflow}}] if options.mlflow else []
    sections += [{"wandb": {}}] if options.wandb else []
    load = os.getloadavg()[0]
    results = [result for section in sections for result in measure(section, options.steps)]
    print(f"{options.steps} steps, on {os.cpu_count()} cores, load {load:.1f} before the run")
    for result in results:
        print(f"{result['name']:32} {result['median']:10.4f} {result['unit']}")
    if options.json:
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        machine = {"cpus": os.cpu_count(), "load": load}
        document = {"bench": "trackers_cost", "commit": commit, "machine": machine, "settings": build_spec(options.steps)}
        options.json.write_text(json.dumps({**document, "results": results}, indent=1) + "\n")
