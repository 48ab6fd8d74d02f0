"""How far is a run from its plan? `python bench/plan_accuracy.py [--json FILE] [--quick]`

Starts a platform with one worker, prepares the letters task, and trains some runs from which later plans can learn. Then ten runs
with settings that none of them had are submitted one after another; each keeps the plan of its submission. The policy hardly
learns (`LEARNING_RATE`): no plan knows how training will change the lengths of its responses. Prints planned and
actual step time and peak memory of each, and the median deviations. Exit status 1 if these exceed 20 % in time or 10 % in memory.
Other programs on the machine change step times, so that it must be quiet.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_bench.document import Result
from oppo_bench.platform_stack import Running, running_platform, wait_for
from oppo_bench.report import write_results
from oppo_bench.scheduler.command import bench_servers, other_programs
from oppo_contract.yaml_text import parse_yaml

if TYPE_CHECKING:
    from oppo_bench.machine_load import Machine

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "oppo.yaml"
MODELS = ("letters/actor", "letters/reward")
STEPS, QUICK_STEPS = 15, 4
QUICK_RUNS = (1, 2)  # to learn from, and to predict
RUN_WITHIN_S, CATALOGUE_WITHIN_S = 3600.0, 60.0
TIME_TARGET, MEMORY_TARGET = 0.20, 0.10
FIGURES = {"step_s": ("time/deviation", TIME_TARGET), "peak_memory_bytes": ("memory/deviation", MEMORY_TARGET)}

# At the example's rate the mean length goes from 23 to 217 tokens and back to 36 within 40 steps.
LEARNING_RATE = 1e-6

OFF = {"intra_step": "off", "inter_step": "off"}
NO_DELTA = {"overlap.inter_step": "off", "overlap.overcommit": {}}
# Changes of examples/oppo.yaml by dotted path.
LEARNED: tuple[dict[str, Any], ...] = (
    {},
    {"overlap": OFF},
    {"ppo.batch_size": 32, "rollout.max_new_tokens": 192},
)
UNSEEN: tuple[dict[str, Any], ...] = (
    {"ppo.batch_size": 24},
    {"ppo.batch_size": 8},
    {"rollout.max_new_tokens": 128},
    {"overlap": OFF, "ppo.batch_size": 32},
    {"overlap": OFF, "rollout.max_new_tokens": 256},
    {"ppo.batch_size": 48, "rollout.max_new_tokens": 256},
    {"ppo.epochs": 2},
    {"ppo.micro_batch_tokens": 2048, "ppo.batch_size": 32},
    {**NO_DELTA, "overlap.intra_step": "per_sequence", "ppo.batch_size": 24},
    {"training.recompute": "full", "ppo.batch_size": 24},
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run's planned and actual figures by name, and what its time was based on."""

    name: str
    basis: str
    planned: dict[str, float | None]
    actual: dict[str, float | None]

    def deviation(self, figure: str) -> float | None:
        """|actual ÷ planned − 1|; None if one is missing."""
        planned, actual = self.planned[figure], self.actual[figure]
        return abs(actual / planned - 1) if planned and actual is not None else None


def spec_with(changes: dict[str, Any], steps: int, name: str) -> dict[str, Any]:
    """examples/oppo.yaml with other values at dotted paths."""
    spec = copy.deepcopy(parse_yaml(EXAMPLE.read_text()))
    for path, value in {
        **changes,
        "name": name,
        "steps": steps,
        "checkpoints.every_steps": 1000,
        "resources.kind": "cpu",
        "ppo.learning_rate": LEARNING_RATE,
    }.items():
        *sections, last = path.split(".")
        section = spec
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    return dict(spec)


def describe(changes: dict[str, Any]) -> str:
    """The changes in a line."""
    words = (f"{path.rpartition('.')[2]}={'off' if value == OFF else value}" for path, value in changes.items() if value != {})
    return " ".join(words) or "oppo.yaml"


def train(running: Running, changes: dict[str, Any], steps: int) -> Comparison:
    """Submit a run, wait for its end, and compare it with its plan."""
    run_id = running.submit(spec_with(changes, steps, f"plan {describe(changes)}"[:120]))
    wait_for(lambda: running.ended([run_id]), f"the end of run {run_id}", RUN_WITHIN_S)
    summary = running.client.get(run_id).summary
    if summary["state"] != "succeeded":
        raise RuntimeError(f"run {run_id} {summary['state']}: {summary['reason']}")
    review = summary["plan"]
    planned, actual = ({each["name"]: each[column] for each in review["figures"]} for column in ("planned", "actual"))
    return Comparison(describe(changes), review["plan"]["time"]["basis"] or "unknown", planned, actual)


def results_of(compared: list[Comparison]) -> list[Result]:
    """Median, smallest and largest deviation of each figure that was measured."""
    deviations = {figure: [d for each in compared if (d := each.deviation(figure)) is not None] for figure in FIGURES}
    return [Result.of(FIGURES[figure][0], "share", values) for figure, values in deviations.items() if values]


def complaints(results: list[Result]) -> list[str]:
    """Figures whose median deviation exceeds its target, or that were not measured."""
    medians = {result.name: result.median for result in results}
    found = [f"{name} was not measured" for name, _ in FIGURES.values() if name not in medians]
    return found + [
        f"{name}: median {medians[name]:.0%}, at most {target:.0%} expected"
        for name, target in FIGURES.values()
        if medians.get(name, 0.0) > target
    ]


def line(compared: Comparison) -> str:
    """A row of the printed table."""

    def pair(figure: str, unit: float, digits: int) -> str:
        planned, actual = (column[figure] for column in (compared.planned, compared.actual))
        texts = ("–" if value is None else f"{value / unit:,.{digits}f}" for value in (planned, actual))
        deviation = compared.deviation(figure)
        return f"{' '.join(f'{text:>9}' for text in texts)} {'–' if deviation is None else f'{deviation:.0%}':>6}"

    return f"{compared.name[:44]:44} {pair('step_s', 1, 2)} {pair('peak_memory_bytes', 1e6, 0)}  {compared.basis}"


def compare_runs(learned: int, unseen: int, steps: int) -> list[Comparison]:
    """Train runs to learn from, then the others; prints each as it ends."""
    from examples.letters.prepare import FAST, Settings, prepare

    prepare(
        Path(os.environ["OPPO_HOME"]) / "models" / "letters",
        FAST if unseen < len(UNSEEN) else Settings(),
        lambda share, activity: None,
    )
    heading = f"{'run':44} {'step, s':>9} {'actual':>9} {'':6} {'peak, MB':>9} {'actual':>9}"
    with running_platform(1, {}) as running:
        wait_for(_models_reported, "the worker's report of the models", CATALOGUE_WITHIN_S)
        print(f"To learn from\n{heading}")
        for changes in LEARNED[:learned]:
            print(line(train(running, changes, steps)), flush=True)
        print(f"\nUnseen\n{heading}")
        compared = []
        for changes in UNSEEN[:unseen]:
            compared.append(train(running, changes, steps))
            print(line(compared[-1]), flush=True)
    return compared


def _models_reported() -> bool:
    from oppo_platform.cluster.models import CatalogueItem

    return CatalogueItem.objects.filter(entry_id__in=MODELS, layers__gt=0).count() == len(MODELS)


def main() -> int:
    """Train, compare, print, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="three short runs, to try the command")
    parser.add_argument("--steps", type=int, help=f"steps of each run; default {STEPS}, or {QUICK_STEPS} with --quick")
    options = parser.parse_args()
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    machine: Machine = other_programs()
    with bench_servers():
        learned, unseen = QUICK_RUNS if options.quick else (len(LEARNED), len(UNSEEN))
        compared = compare_runs(learned, unseen, steps)
    results = results_of(compared)
    print()
    for result in results:
        print(f"{result.name}: median {result.median:.0%}, {result.min:.0%} to {result.max:.0%}, {result.n} runs")
    settings = {"seed": 0, "steps": steps, "learned": learned, "runs": [each.name for each in compared]}
    write_results("plan_accuracy", machine, settings, results, options.json)
    found = complaints(results)
    if machine.complaint:
        found.append(machine.complaint)
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0
