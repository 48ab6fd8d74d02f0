"""Does PPO learn on every seed, sequential and OPPO alike? `python bench/learning.py --work DIR [--json FILE] [--quick]`

Trains the letters task on the *learned* reward model and scores held-out prompts by the *rule*, which training never uses.
A run is good if that score rises by more than five standard errors, the KL stays within its limit, and the long tail of
lengths remains. Exit status 0 only if all runs are good. Variants are interleaved: seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from examples.letters.learning import Evaluation, evaluate, read_prompts
from examples.letters.prepare import PercentLines, Settings, prepare
from oppo_contract.events import Event, StepEvent, parse_event
from oppo_contract.spec import RunSpec
from oppo_contract.yaml_text import load_yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
VARIANTS = ("sequential", "oppo")
SEEDS, QUICK_STEPS = 5, 60
RISE_WANTED_SE = 5.0
# KL(policy ‖ reference) of a whole answer: a batch's mean, and the median over the last tenth of the steps, because one
# degenerate answer in some thousands carries 2,000 nats and would dominate a mean.
KL_LIMIT_NATS = 10.0
TAIL_WANTED = 0.75  # 95th percentile of lengths after training ÷ before


@dataclass(frozen=True, slots=True)
class Outcome:
    """Effect of one training run on the held-out prompts."""

    variant: str
    seed: int
    rule_before: float
    rule_after: float
    rise_se: float  # rise ÷ its standard error
    kl_nats: float  # median over the last tenth of the steps
    kl_mean_nats: float  # mean over the same steps: reported, not tested
    p95_ratio: float
    step_s: float

    @property
    def good(self) -> bool:
        """Learned, near the reference, with the tail of lengths."""
        return self.rise_se > RISE_WANTED_SE and self.kl_nats <= KL_LIMIT_NATS and self.p95_ratio >= TAIL_WANTED


def train(variant: str, seed: int, steps: int | None, models: Path, out: Path) -> list[StepEvent]:
    """Run the engine on an example spec; raises CalledProcessError when it fails."""
    spec = load_yaml((EXAMPLES / f"{variant}.yaml").read_text())
    events = run_engine(spec.model_copy(update={"seed": seed, "steps": steps or spec.steps}), models, out)
    return [event for event in events if isinstance(event, StepEvent)]


def run_engine(spec: RunSpec, models: Path, out: Path, threads: int | None = None) -> list[Event]:
    """Run the engine in another process, in the new folder `out`; returns its events. Raises CalledProcessError when it fails.

    `threads`: its CPU cores; None: all.
    """
    out.mkdir(parents=True, exist_ok=False)
    (out / "spec.json").write_text(spec.model_dump_json())
    events = out / "events.jsonl"
    command = [sys.executable, "-m", "oppo_core", "--spec", str(out / "spec.json"), "--out", str(out)]
    cores = [] if threads is None else ["--threads", str(threads)]
    subprocess.run([*command, "--events", str(events), "--root", str(models), *cores], check=True)
    return [parse_event(line) for line in events.read_text().splitlines()]


def outcome(variant: str, seed: int, before: Evaluation, after: Evaluation, steps: Sequence[StepEvent]) -> Outcome:
    """Compare held-out answers before and after, and read the KL of the last tenth of the steps."""
    error = math.hypot(before.standard_error, after.standard_error)
    kls = [step.metrics["objective/kl"] for step in steps[-max(1, len(steps) // 10) :]]
    return Outcome(
        variant, seed, before.rule, after.rule, (after.rule - before.rule) / error,
        statistics.median(kls), statistics.mean(kls), after.length_p95 / before.length_p95,
        steps[-1].elapsed_s / len(steps),
    )  # fmt: skip


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per run."""
    head = "variant      seed  rule before   after  rise, SE  KL, nats    mean  p95 kept  s/step  good"
    lines = [
        f"{o.variant:12}{o.seed:5}{o.rule_before:13.3f}{o.rule_after:8.3f}{o.rise_se:10.1f}{o.kl_nats:10.2f}{o.kl_mean_nats:8.2f}"
        f"{o.p95_ratio:10.2f}{o.step_s:8.3f}  {'yes' if o.good else 'NO'}"
        for o in outcomes
    ]
    return "\n".join([head, *lines])


def results(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Rows of the benchmark format."""
    units = {
        "rule_before": "score",
        "rule_after": "score",
        "rise_se": "se",
        "kl_nats": "nats",
        "p95_ratio": "ratio",
        "step_s": "s",
    }
    rows: list[dict[str, object]] = []
    for variant in VARIANTS:
        for field, unit in units.items():
            values = [asdict(o)[field] for o in outcomes if o.variant == variant]
            spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
            rows.append({"name": f"{variant}/{field}", "unit": unit, **spread})
    return rows


def main() -> int:
    """Prepare, train, score, print; 0 if every run is good."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and runs; models are kept and used again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_STEPS} steps")
    options = parser.parse_args()
    seeds, steps = (1, QUICK_STEPS) if options.quick else (options.seeds, None)
    prepare(options.work / "models" / "letters", Settings(), PercentLines())
    models = options.work / "models"
    prompts = read_prompts(models / "letters" / "heldout.jsonl")
    before = evaluate(models / "letters" / "actor", prompts)
    outcomes = []
    for seed in range(seeds):
        for variant in VARIANTS:
            out = options.work / "runs" / f"{variant}-{seed}-{os.getpid()}"
            trained = train(variant, seed, steps, models, out)
            after = evaluate(out / "checkpoints" / f"step-{trained[-1].step:08d}" / "actor", prompts)
            outcomes.append(outcome(variant, seed, before, after, trained))
            print(table(outcomes[-1:]).splitlines()[-1], flush=True)
    print(table(outcomes))
    if options.json:
        write_json(options.json, outcomes, {"seeds": seeds, "steps": trained[-1].step})
    return 0 if all(o.good for o in outcomes) else 1


def write_json(path: Path, outcomes: Sequence[Outcome], settings: dict[str, object]) -> None:
    """The bench format (docs/benchmarks.md)."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=EXAMPLES).stdout.strip()
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    runs = [asdict(o) | {"good": o.good} for o in outcomes]
    report: dict[str, object] = {"bench": "learning", "commit": commit, "machine": machine, "settings": settings}
    report |= {"results": results(outcomes), "runs": runs}
    path.write_text(json.dumps(report, indent=2) + "\n")
