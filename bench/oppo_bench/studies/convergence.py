"""Does OPPO learn as much as sequential PPO, per step? `python bench/convergence.py --work DIR [--json F] [--plot F]`

Paired seeds on the letters task: the same seed trains both variants. Two figures per run, declared beforehand: the *final reward*
(the rule's mean score of held-out prompts) and the *steps to the target* (first step at which the mean training score of the
last ten steps reaches `budget.target_reward`). The variants count as equivalent in a figure if the 90 % bootstrap interval
of the mean paired difference is within ± 10 % of the sequential median (two one-sided tests at 5 %). `--ablation` also trains
settings whose staleness could harm: `max_age` 1, 2, 5 and unlimited; importance weights off, for stale tokens, for all.

Time is not measured, so several runs train at once, each on one core. Exit status 0 only if equivalent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.letters.learning import evaluate, read_prompts
from examples.letters.prepare import PercentLines, Settings, prepare
from oppo_contract.events import StepEvent, parse_event
from oppo_contract.spec import RunSpec, load_spec
from oppo_contract.yaml_text import load_yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SEEDS, ABLATION_SEEDS, QUICK_STEPS = 8, 2, 60
MARGIN = 0.10
WINDOW = 10  # steps over which the training score is averaged
RESAMPLES = 20_000
UNLIMITED = 1000
FIGURES = {"final_reward": "score", "steps_to_target": "steps"}


@dataclass(frozen=True, slots=True)
class Variant:
    """A name, and its changes of `oppo.yaml` (None: the sequential example)."""

    name: str
    overlap: dict[str, Any] | None = None
    tis: str = "stale"

    def spec(self, seed: int, steps: int | None) -> RunSpec:
        """The example's spec with this variant's changes."""
        tree = load_yaml((EXAMPLES / ("sequential.yaml" if self.overlap is None else "oppo.yaml")).read_text()).model_dump()
        tree["overlap"] |= self.overlap or {}
        tree["ppo"]["tis"] = self.tis
        return load_spec(tree | {"seed": seed, "steps": steps or tree["steps"]})


PAIR = (Variant("sequential"), Variant("oppo", {}))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run. `scores`: mean training score per step; `steps_to_target` is `steps` + 1 if it was not reached."""

    variant: str
    seed: int
    scores: list[float]
    final_reward: float
    steps_to_target: int
    stale_share: float  # of the trained tokens, mean over the steps
    ess: float  # smallest effective share of a step's tokens


def ablation() -> list[Variant]:
    """Every age limit with every importance weighting, and the sequential run."""
    ages = {1: "1", 2: "2", 5: "5", UNLIMITED: "∞"}
    cells = product(ages.items(), ("off", "stale", "all"))
    return [Variant(f"max_age {name}, tis {tis}", {"max_age": age}, tis) for (age, name), tis in cells]


def train(variant: Variant, seed: int, steps: int | None, models: Path, out: Path) -> list[StepEvent]:
    """Train in a process on one core, or read a finished run again; raises CalledProcessError when training fails."""
    events = out / "events.jsonl"
    if not (out / "done").exists():
        out.mkdir(parents=True, exist_ok=True)
        events.unlink(missing_ok=True)
        (out / "spec.json").write_text(variant.spec(seed, steps).model_dump_json())
        command = [sys.executable, "-m", "oppo_core", "--spec", str(out / "spec.json"), "--out", str(out), "--threads", "1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--events", str(events), "--root", str(models)], check=True, env=environment)
        (out / "done").touch()
    parsed = (parse_event(line) for line in events.read_text().splitlines())
    return [event for event in parsed if isinstance(event, StepEvent)]


def outcome(variant: Variant, seed: int, steps: int | None, work: Path, prompts: Sequence[str]) -> Outcome:
    """Train, score held-out prompts, and find the step that reached the target."""
    out = work / "runs" / f"{variant.name.replace(' ', '-').replace(',', '')}-{seed}-{steps or 'all'}"
    events = train(variant, seed, steps, work / "models", out)
    scores = [step.metrics["critic/score/mean"] for step in events]
    target = variant.spec(seed, steps).budget.target_reward
    assert target is not None
    smooth = np.convolve(scores, np.ones(WINDOW) / WINDOW, mode="valid")
    reached = np.flatnonzero(smooth >= target)
    evaluation = evaluate(out / "checkpoints" / f"step-{events[-1].step:08d}" / "actor", prompts)
    return Outcome(
        variant.name, seed, scores, evaluation.rule, int(reached[0]) + WINDOW if len(reached) else len(scores) + 1,
        statistics.mean(step.metrics["oppo/deferred_token_share"] for step in events),
        min(step.metrics["oppo/ess"] for step in events),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of both variants: medians, and the mean paired difference (OPPO − sequential) with its 90 % interval."""

    figure: str
    sequential: float
    oppo: float
    difference: float
    low: float
    high: float
    margin: float

    @property
    def equivalent(self) -> bool:
        """Whether the whole interval is within the margin."""
        return -self.margin <= self.low and self.high <= self.margin


def compare(outcomes: Sequence[Outcome], figure: str) -> Comparison:
    """Bootstrap over the pairs."""
    values = {
        name: np.array([getattr(o, figure) for o in sorted(outcomes, key=lambda o: o.seed) if o.variant == name], dtype=float)
        for name in ("sequential", "oppo")
    }
    differences = values["oppo"] - values["sequential"]
    drawn = np.random.default_rng(0).integers(0, len(differences), (RESAMPLES, len(differences)))
    low, high = np.quantile(differences[drawn].mean(-1), [0.05, 0.95])
    median = float(np.median(values["sequential"]))
    return Comparison(
        figure, median, float(np.median(values["oppo"])), float(differences.mean()), float(low), float(high), MARGIN * abs(median)
    )


def pair_table(comparisons: Sequence[Comparison]) -> str:
    """One line per figure."""
    lines = [
        f"{c.figure:16}{c.sequential:12.3f}{c.oppo:10.3f}{c.difference:+12.3f}   [{c.low:+.3f}, {c.high:+.3f}]   ± {c.margin:.3f}"
        f"   {'equivalent' if c.equivalent else 'NOT SHOWN TO BE EQUIVALENT'}"
        for c in comparisons
    ]
    head = "figure            sequential      oppo  difference   90 % interval of it   margin"
    return "\n".join([head, *lines])


def ablation_table(outcomes: Sequence[Outcome]) -> str:
    """One line per variant, over its seeds."""
    lines = ["variant                   seeds  final reward (min–max)   steps to target (min–max)   stale tokens   least ess"]
    for name in dict.fromkeys(o.variant for o in outcomes):
        rows = [o for o in outcomes if o.variant == name]
        rewards, steps = [o.final_reward for o in rows], [o.steps_to_target for o in rows]
        lines.append(
            f"{name:26}{len(rows):5}   {statistics.mean(rewards):.3f} ({min(rewards):.3f}–{max(rewards):.3f})"
            f"       {statistics.mean(steps):6.1f} ({min(steps)}–{max(steps)})"
            f"{statistics.mean(o.stale_share for o in rows):15.1%}{min(o.ess for o in rows):12.3f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Prepare, train, compare, print; 0 when both figures are equivalent."""
    options = _parser().parse_args()
    seeds, steps = (1, QUICK_STEPS) if options.quick else (options.seeds, None)
    prepare(options.work / "models" / "letters", Settings(), PercentLines())
    prompts = read_prompts(options.work / "models" / "letters" / "heldout.jsonl")
    jobs = [(variant, seed) for seed in range(seeds) for variant in PAIR]
    if options.ablation:
        jobs += [(variant, seed) for seed in range(min(seeds, ABLATION_SEEDS)) for variant in ablation()]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(lambda job: outcome(job[0], job[1], steps, options.work, prompts), jobs))
    paired = [o for o in outcomes if o.variant in ("sequential", "oppo")]
    comparisons = [compare(paired, figure) for figure in FIGURES]
    print(f"{seeds} paired seeds, {len(paired[0].scores)} steps")
    print(pair_table(comparisons))
    if options.ablation:
        chosen = [o for o in outcomes if o.seed < ABLATION_SEEDS]
        print(ablation_table(chosen))
    if options.json:
        write_json(options.json, outcomes, comparisons)
    if options.plot:
        from oppo_bench.studies.convergence_plot import draw

        draw(options.plot, paired, PAIR[0].spec(0, steps).budget.target_reward or 0.0)
    return 0 if all(c.equivalent for c in comparisons) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and runs; what is there is used again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="curves of both variants as a PNG or SVG file (needs a chromium)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--ablation", action="store_true", help=f"the staleness table too, {ABLATION_SEEDS} seeds a cell")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time")
    parser.add_argument("--quick", action="store_true", help=f"one seed, {QUICK_STEPS} steps: shows that it works, and no more")
    return parser


def write_json(path: Path, outcomes: Sequence[Outcome], comparisons: Sequence[Comparison]) -> None:
    """Write the benchmark format (docs/benchmarks.md) with every run's curve."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=EXAMPLES).stdout.strip()
    rows = []
    for name, (figure, unit) in product(dict.fromkeys(o.variant for o in outcomes), FIGURES.items()):
        values = [getattr(o, figure) for o in outcomes if o.variant == name]
        spread = {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
        rows.append({"name": f"{name}/{figure}", "unit": unit, **spread})
    report = {
        "bench": "convergence", "commit": commit, "results": rows,
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__},
        "settings": {"margin": MARGIN, "window": WINDOW, "steps": len(outcomes[0].scores)},
        "comparisons": [asdict(c) | {"equivalent": c.equivalent} for c in comparisons],
        "runs": [asdict(o) for o in outcomes],
    }  # fmt: skip
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
