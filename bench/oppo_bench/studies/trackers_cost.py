"""What does a tracker cost? `python bench/trackers_cost.py [--mlflow URI] [--wandb] [--json FILE] [--steps N]`

Trains the run of `oppo_bench.telemetry.logging_cost` (hidden 128, 16 answers, four samples a step) once for each tracker,
TensorBoard always, and measures what the engine's thread does for it in each step, which is all that training waits for, and what
the tracker's own process does; both by processor time, which others on the machine change little. MLflow needs a server
(`--mlflow`). Exit status 0 only if the engine's share is below half a percent in the median step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from oppo_bench.telemetry.logging_cost import spec_of
from oppo_contract.spec import load_spec
from oppo_core.engine.build import assemble
from oppo_core.reporting.event_log import Hear, Journal
from oppo_core.trackers.feed import Feed
from oppo_core.trackers.telling import Trackers
from oppo_core.train import train

SHARE_WANTED = 0.005
LEFT_OUT = 5  # steps in which the tracker's process may still be starting
FLUSH_S = 120.0


@dataclass(slots=True)
class Watch:
    """Processor time that the engine's thread gave to the tracker, and the tracker's own, seconds, by step."""

    plain: Hear
    feed: Feed
    given_s: float = 0.0
    steps: list[tuple[float, float, float]] = field(default_factory=list)  # when it ended, both so far
    memory: int = 0  # bytes of the tracker's process, at the last step

    def hear(self, kind: str, payload: dict[str, Any], line: str) -> None:
        """`Trackers.hear`, measured. A `step` event ends a step."""
        start = time.thread_time()
        self.plain(kind, payload, line)
        self.given_s += time.thread_time() - start
        if kind == "step":
            family = family_of(self.feed.process.pid)
            times = [each.cpu_times() for each in family]
            self.steps.append((time.perf_counter(), self.given_s, sum(each.user + each.system for each in times)))
            self.memory = sum(each.memory_info().rss for each in family)


def family_of(pid: int) -> list[psutil.Process]:
    """A process and those that it has started and that are still there."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def measure(section: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Rows of the bench format for one tracker."""
    tree = spec_of(steps)
    tree["logging"]["trackers"] = {**section, "flush_s": FLUSH_S}
    spec = load_spec(tree)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(64)))
        journal = Journal(folder / "events.jsonl")
        trackers = Trackers(journal)
        trackers.start(spec, folder)
        [feed] = trackers.feeds
        watch = Watch(trackers.hear, feed)
        journal.hear = watch.hear
        engine = assemble(spec, [folder], folder, journal)
        try:
            train(engine, lambda: False)
        finally:
            engine.scorers.close()
            trackers.close("succeeded")
            journal.close()
    assert feed.taken == steps, f"{feed.title} was told of {feed.taken} steps of {steps}"
    return rows_of(next(iter(section)), watch)


def rows_of(name: str, watch: Watch) -> list[dict[str, Any]]:
    """The figures of one run."""
    pairs = list(zip(watch.steps[LEFT_OUT:], watch.steps[LEFT_OUT + 1 :], strict=False))
    lengths = [after[0] - before[0] for before, after in pairs]
    given = [after[1] - before[1] for before, after in pairs]
    whole = (watch.steps[-1][2] - watch.steps[LEFT_OUT][2]) / len(pairs)
    return [
        row(f"{name}/step_ms", "ms", [1e3 * length for length in lengths]),
        row(f"{name}/engine_us_a_step", "us", [1e6 * s for s in given]),
        row(f"{name}/engine_share", "share", [s / length for s, length in zip(given, lengths, strict=True)]),
        row(f"{name}/process_ms_a_step", "ms", [1e3 * whole]),
        row(f"{name}/process_mib", "MiB", [watch.memory / 2**20]),
    ]


def row(name: str, unit: str, values: list[float]) -> dict[str, Any]:
    """One result: median, minimum and maximum over the steps."""
    return {"name": name, "unit": unit, "median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def main() -> int:
    """Measure, print a table, and write the bench format when asked."""
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
        print(f"{result['name']:32} median {result['median']:10.4f}  min {result['min']:10.4f}  max {result['max']:10.4f}")
    if options.json:
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        machine = {"cpus": os.cpu_count(), "load": load}
        document = {"bench": "trackers_cost", "commit": commit, "machine": machine, "settings": spec_of(options.steps)}
        options.json.write_text(json.dumps({**document, "results": results}, indent=1) + "\n")
    return 0 if all(r["median"] <= SHARE_WANTED for r in results if r["unit"] == "share") else 1
