"""Does PPO improve a published language model? `python bench/real_model.py --task sentiment [--seeds 3] [--json FILE]`

Trains a spec of `examples/smollm2` once per seed and compares the scores of the same held-out prompts before and after, prompt
by prompt. A seed is good if the score rises by more than five standard errors within the task's time, and the KL stays below
`budget.max_kl`. Exit status 0 only if enough seeds are good. With `--sequential` each seed also trains without overlap.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.smollm2.prepare import main as prepare
from oppo_bench.document import Result, document, write
from oppo_bench.machine_load import Machine
from oppo_bench.studies.learning import EXAMPLES, run_engine
from oppo_contract.events import Event, Sample, SamplesEvent, StepEvent
from oppo_contract.presets import PRESETS
from oppo_contract.spec import RunSpec
from oppo_contract.yaml_text import load_yaml

RISE_WANTED_SE = 5.0
SHOWN = 8
SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Goal:
    """Time allowed per seed, minutes, and how many of three seeds must be good."""

    minutes: float
    of_three: int


GOALS = {"sentiment": Goal(6, 3), "reward_model": Goal(15, 3), "arithmetic": Goal(60, 2)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: mean held-out scores before and after, the rise in standard errors of the paired difference, time and KL."""

    seed: int
    before: float
    after: float
    rise_se: float
    minutes: float  # models' loading and evaluations included
    kl: float  # mean over the last tenth of the steps, nats per response
    step_s: float  # median
    pairs: list[tuple[Sample, Sample]] = field(repr=False)

    def good(self, goal: Goal, max_kl: float) -> bool:
        """Risen, in time, near the reference."""
        return self.rise_se > RISE_WANTED_SE and self.minutes <= goal.minutes and self.kl <= max_kl


def outcome(seed: int, events: Sequence[Event], seconds: float) -> Outcome:
    """Compare the first and the last evaluation, prompt by prompt."""
    evaluated: dict[int, dict[int, Sample]] = {}
    for event in events:
        if isinstance(event, SamplesEvent):
            held_out = {sample.sequence_id: sample for sample in event.samples if sample.held_out}
            if held_out:
                evaluated.setdefault(event.step, {}).update(held_out)  # a large evaluation has several events
    first, last = evaluated[min(evaluated)], evaluated[max(evaluated)]
    pairs = [(first[prompt], last[prompt]) for prompt in sorted(first)]
    rises = [after.score - before.score for before, after in pairs]
    steps = list({event.step: event for event in events if isinstance(event, StepEvent)}.values())  # the last may come twice
    kls = [event.metrics["objective/kl"] for event in steps[-max(1, len(steps) // 10) :]]
    return Outcome(
        seed, statistics.mean(before.score for before, _ in pairs), statistics.mean(after.score for _, after in pairs),
        in_standard_errors(rises), seconds / 60, statistics.mean(kls),
        statistics.median(event.metrics["timing_s/step"] for event in steps[1:] or steps), pairs,
    )  # fmt: skip


def in_standard_errors(rises: Sequence[float]) -> float:
    """Mean of paired differences in units of its standard error; infinite where all are equal and not 0."""
    mean, error = statistics.mean(rises), statistics.stdev(rises) / math.sqrt(len(rises))
    return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0


def train(spec: RunSpec, seed: int, models: Path, out: Path) -> Outcome:
    """Run the engine with `seed`; raises CalledProcessError when it fails."""
    start = time.monotonic()
    events = run_engine(spec.model_copy(update={"seed": seed}), models, out)
    return outcome(seed, events, time.monotonic() - start)


def sequential(spec: RunSpec) -> RunSpec:
    """The same run without overlap."""
    overlap = next(preset.overlap for preset in PRESETS if preset.key == "sequential")
    return RunSpec.model_validate(spec.model_dump(exclude_unset=True) | {"overlap": overlap})


def results(task: str, outcomes: Sequence[Outcome], without: Sequence[Outcome]) -> list[Result]:
    """Rows of the benchmark format, one per seed and figure."""
    units = {"rise_se": "se", "minutes": "min", "kl": "nats", "before": "score", "after": "score", "step_s": "s"}
    rows = [
        Result.of(f"{task}/seed{run.seed}/{name}", unit, [getattr(run, name)]) for run in outcomes for name, unit in units.items()
    ]
    ratios = [plain.step_s / run.step_s for plain, run in zip(without, outcomes, strict=False)]
    return rows + ([Result.of(f"{task}/sequential_over_oppo", "ratio", ratios)] if ratios else [])


def print_samples(run: Outcome) -> None:
    """Print the first held-out responses before and after."""
    for before, after in run.pairs[:SHOWN]:
        prompt = before.prompt.strip().splitlines()[-1] if before.prompt.strip() else ""
        print(f"  {prompt[-SHOWN_CHARACTERS:]!r}")
        for name, sample in (("before", before), ("after", after)):
            print(f"    {name:6} {sample.score:6.2f}  {sample.response[:SHOWN_CHARACTERS]!r}")


def main() -> int:
    """Prepare, train every seed, print, write; 0 if enough seeds are good."""
    options = _options()
    os.environ.setdefault("TQDM_DISABLE", "1")
    spec = load_yaml((EXAMPLES / f"smollm2/{options.task}.yaml").read_text())
    if options.steps:
        evaluation = spec.evaluation and spec.evaluation.model_copy(update={"every_steps": options.steps})
        spec = spec.model_copy(update={"steps": options.steps, "evaluation": evaluation})
    goal, limit = GOALS[options.task], spec.budget.max_kl or math.inf
    models = options.models
    prepare(["--out", str(models / "smollm2"), *(["--reward-model"] if options.task == "reward_model" else [])])
    machine, outcomes, without = Machine(os.cpu_count() or 1, os.getloadavg()[0], None), list[Outcome](), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="real-model-", dir=options.work) as work:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            runs = [(spec, outcomes), *([(sequential(spec), without)] if options.sequential else [])]
            for number, (variant, done) in enumerate(runs):
                done.append(train(variant, seed, models, Path(work) / f"{seed}-{number}"))
                run = done[-1]
                print(
                    f"{options.task} seed {seed}{' sequential' if number else ''}: {run.before:.3f} → {run.after:.3f},"
                    f" {run.rise_se:.1f} standard errors, {run.minutes:.1f} min, {run.step_s:.1f} s a step, KL {run.kl:.1f} nats",
                    flush=True,
                )
            print_samples(outcomes[-1])
            if options.json:  # after each seed: a later one may fail
                settings = {"task": options.task, "seeds": len(outcomes), "steps": spec.steps, "dtype": spec.resources.dtype}
                write(options.json, document("real_model", machine, settings, results(options.task, outcomes, without)))
    good = sum(run.good(goal, limit) for run in outcomes)
    print(f"{good} of {len(outcomes)} seeds rose by more than {RISE_WANTED_SE:g} standard errors within {goal.minutes:g} minutes")
    return 0 if good >= math.ceil(len(outcomes) * goal.of_three / 3) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(GOALS), required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="other than the spec's, for a quick look")
    parser.add_argument("--sequential", action="store_true", help="also train each seed without overlap")
    parser.add_argument("--models", type=Path, default=Path("data"), help="models root, filled if it lacks the model")
    parser.add_argument("--work", type=Path, help="folder for the runs, deleted at the end; default: the system's")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()
