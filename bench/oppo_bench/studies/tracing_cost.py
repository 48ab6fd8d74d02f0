"""What does the timeline cost? `python bench/tracing_cost.py [--hidden N] [--json FILE] [--steps N]`

Trains a small OPPO run on all cores (hidden 128, 16 answers with a long tail of lengths). Accounting and writing the event are
timed where they happen, in every step, with the caches as cold as training leaves them; recording a span and sending it to
the other process are too short for that and are timed in loops. The cost of tracing a step is its spans × the cost of one,
compared with the time that the step took. Exit status 0 only if the share is below half a percent in the median step.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from oppo_contract.spec import RunSpec, load_spec
from oppo_core.engine.build import assemble
from oppo_core.reporting import step_report
from oppo_core.reporting.event_log import Journal
from oppo_core.trace.recorder import Recorder, Span, Wait
from oppo_core.trace.step_trace import StepTrace
from oppo_core.train import train

SHARE_WANTED = 0.005
REPETITIONS, RECORDED = 15, 20_000
PARTS = ("record", "send", "account", "write")


def spec_of(hidden: int, steps: int) -> dict[str, Any]:
    """An untrained model ends an answer with probability 1/vocab: lengths are geometric, as long a tail as real ones have."""
    tiny = {"hidden": hidden, "layers": 2, "heads": 4, "context": 400, "vocab": 64}
    return {
        "name": "tracing cost", "steps": steps, "data": {"prompts": "prompts.jsonl"}, "checkpoints": {"every_steps": 1000},
        "models": {"actor": {"tiny": tiny}, "reward": {"model": {"tiny": tiny}}, "critic": "reward"},
        "ppo": {"batch_size": 16}, "rollout": {"max_new_tokens": 384, "max_prompt_tokens": 16},
        "overlap": {"overcommit": {"initial": 8, "max": 8}, "chunk": {"size": 16}},
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """How long a step took, what it recorded, and the seconds that accounting and writing the event took in it."""

    length_s: float
    spans: list[Span]
    waits: list[Wait]
    account_s: float
    write_s: float


@dataclass(slots=True)
class Watch:
    """Collects the `Step`s of a run, from within."""

    steps: list[Step] = field(default_factory=list)
    account_s: float = 0.0
    trace: Any = None

    def trace_class(self) -> type[StepTrace]:
        """`StepTrace`, timed."""
        watch = self

        class Timed(StepTrace):
            def __init__(self, *given: Any) -> None:
                start = time.perf_counter()
                super().__init__(*given)
                self.waits: list[Wait] = given[2]
                watch.account_s = time.perf_counter() - start

            def metrics(self, tokens: int) -> dict[str, float]:
                start = time.perf_counter()
                found = super().metrics(tokens)
                watch.account_s += time.perf_counter() - start
                watch.trace = self
                return found

            def event(self, *given: Any) -> dict[str, Any]:
                start = time.perf_counter()
                told = super().event(*given)
                watch.account_s += time.perf_counter() - start
                return told

        return Timed

    def write(self, plain: Callable[..., None], kind: str, **payload: Any) -> None:
        """`Journal.write`, timed; the `spans` event ends a step."""
        start = time.perf_counter()
        plain(kind, **payload)
        if kind == "spans":
            window = self.trace.window
            taken = time.perf_counter() - start
            self.steps.append(Step(window[1] - window[0], self.trace.spans, self.trace.waits, self.account_s, taken))


def trained(spec: RunSpec, folder: Path) -> list[Step]:
    """Train, and return every step but the first."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(64)))
    engine = assemble(spec, [folder], folder, Journal(folder / "events.jsonl"))
    watch = Watch()
    plain = engine.journal.write
    engine.journal.write = partial(watch.write, plain)  # type: ignore[method-assign]
    try:
        with mock.patch.object(step_report, "StepTrace", watch.trace_class()):
            train(engine, lambda: False)
    finally:
        engine.scorers.close()
        engine.journal.close()
    return watch.steps[1:]


def seconds(work: Callable[[], object]) -> float:
    """Median time of `work`."""
    times = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def recording_s() -> float:
    """Seconds that one `with trace.span(…)` takes."""
    trace = Recorder(("cpu:0",))

    def record() -> None:
        for number in range(RECORDED):
            with trace.span("actor", "decode", number, rows=16):
                pass
        trace.take()

    def loop() -> None:
        for _ in range(RECORDED):
            pass

    return (seconds(record) - seconds(loop)) / RECORDED


def cost_s(step: Step, record_s: float) -> dict[str, float]:
    """Seconds that tracing this step took, by part."""
    foreign = [span for span in step.spans if span.role != "actor"]
    return {
        "record": record_s * (len(step.spans) + len(step.waits)),
        "send": seconds(lambda: pickle.loads(pickle.dumps(foreign))),
        "account": step.account_s,
        "write": step.write_s,
    }


def measure(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the bench format."""
    with tempfile.TemporaryDirectory() as name:
        told = trained(load_spec(spec), Path(name))
    record_s = recording_s()
    costs = [cost_s(step, record_s) for step in told]
    counts = [len(step.spans) + len(step.waits) for step in told]
    lengths = [step.length_s for step in told]
    rows = [row("step_ms", "ms", [1e3 * length for length in lengths]), row("spans_a_step", "spans", counts)]
    for part in PARTS:
        rows.append(row(f"{part}_us_a_span", "us", [1e6 * c[part] / n for c, n in zip(costs, counts, strict=True)]))
    whole = [sum(cost.values()) for cost in costs]
    rows.append(row("tracing_us_a_span", "us", [1e6 * w / n for w, n in zip(whole, counts, strict=True)]))
    rows.append(row("tracing_us_a_step", "us", [1e6 * w for w in whole]))
    return [*rows, row("tracing_share", "share", [w / length for w, length in zip(whole, lengths, strict=True)])]


def row(name: str, unit: str, values: list[float] | list[int]) -> dict[str, Any]:
    """One result: median, minimum and maximum over the steps."""
    return {"name": name, "unit": unit, "median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def main() -> int:
    """Measure, print a table, and write the bench format when asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=128)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    spec = spec_of(options.hidden, options.steps)
    results = measure(spec)
    print(f"{options.steps - 1} steps, hidden {options.hidden}, on {os.cpu_count()} cores, load {load:.1f} before the run")
    for result in results:
        print(f"{result['name']:22} median {result['median']:10.4f}  min {result['min']:10.4f}  max {result['max']:10.4f}")
    if options.json:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        machine = {"cpus": os.cpu_count(), "load": load}
        document = {"bench": "tracing_cost", "commit": commit, "machine": machine, "settings": spec, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if results[-1]["median"] <= SHARE_WANTED else 1
