"""How far is a replay from the run that it predicts? `python bench/predictions.py [--repetitions N] [--steps N] [--json FILE]`

Trains the letters task without learning (learning rate 1e-6, so that responses keep their lengths) with five settings. From the
recording of one of them `oppo simulate --from-events` says what another one takes: another schedule, Δ, B or number of devices.
Steps while the pool fills are left out. Other programs on the machine change step times, so that it must be quiet.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from oppo_bench.document import Result
from oppo_bench.report import write_results
from oppo_bench.scheduler.command import other_programs
from oppo_contract.events import StepEvent
from oppo_contract.spec import RunSpec
from oppo_contract.yaml_text import parse_yaml

if TYPE_CHECKING:
    from oppo_core.simulation.counterfactual import Change

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "oppo.yaml"
LEARNING_RATE = 1e-6
STEPS, REPETITIONS = 40, 3
TARGET = 0.15  # largest error of a prediction
OFF: dict[str, Any] = {"intra_step": "off", "inter_step": "off"}


@dataclass(frozen=True, slots=True)
class Setting:
    """Changes of examples/oppo.yaml by dotted path, the cores of the engine (None: all), and its share of the steps."""

    changes: dict[str, Any]
    threads: int | None = None
    share: float = 1.0


SETTINGS = {
    "both": Setting({}),
    "sequential": Setting({"overlap": OFF}),
    "both, Δ = 4": Setting({"overlap.overcommit": {"controller": "fixed", "initial": 4, "min": 0, "max": 4}}),
    # Only the prompts of the recorded run: the recording has no answer lengths of others.
    "both, B = 24": Setting({"ppo.batch_size": 24}, share=16 / 24),
    "both, one core": Setting({"resources.cpu_threads": 1}, threads=1),
}
# The recorded setting, and the predicted one.
PAIRS = (
    ("sequential", "both"), ("both", "sequential"), ("both", "both, Δ = 4"), ("both", "both, B = 24"), ("both", "both, one core"),
)  # fmt: skip


def spec_of(setting: Setting, steps: int) -> RunSpec:
    """examples/oppo.yaml with a setting; Δ and C are fixed, so that only what differs differs."""
    spec: Any = copy.deepcopy(parse_yaml(EXAMPLE.read_text()))
    always = {
        "steps": steps,
        "checkpoints.every_steps": 1000,
        "ppo.learning_rate": LEARNING_RATE,
        "overlap.overcommit.controller": "fixed",
        "overlap.chunk.controller": "fixed",
    }
    for path, value in (always | setting.changes).items():
        *sections, last = path.split(".")
        section = spec
        for each in sections:
            section = section.setdefault(each, {})
        section[last] = value
    return RunSpec.model_validate(spec)


def change_to(predicted: str) -> Change:
    """What differs from the recorded run."""
    from oppo_core.simulation.counterfactual import Change

    return {
        "both": Change(predicted, "both", overcommit=8),
        "sequential": Change(predicted, "sequential"),
        "both, Δ = 4": Change(predicted, "both", overcommit=4),
        "both, B = 24": Change(predicted, batch_size=24),
        "both, one core": Change(predicted, devices=1),
    }[predicted]


def predict(folder: Path, changes: list[Change]) -> dict[str, float]:
    """Mean seconds of a step under each change, from the recording in `folder`."""
    from oppo_core.simulation.counterfactual import counterfactuals
    from oppo_core.simulation.fit_costs import fit
    from oppo_core.simulation.recording import read_recording
    from oppo_estimate.schedules import Target

    recording = read_recording(folder / "events.jsonl")
    rows = counterfactuals(recording, fit(recording), Target(len(recording.steps)), changes)
    for row in rows:
        if row.problem:
            raise RuntimeError(f"{row.schedule}: {row.problem}")
    return {row.schedule: row.step_s for row in rows}


def measure(name: str, models: Path, folder: Path, steps: int) -> float:
    """Train with a setting; mean seconds of a step after the pool has filled."""
    from oppo_bench.studies.learning import run_engine
    from oppo_estimate.schedules import warm_up

    setting = SETTINGS[name]
    steps = int(setting.share * steps)
    spec = spec_of(setting, steps)
    events = [event for event in run_engine(spec, models, folder, setting.threads) if isinstance(event, StepEvent)]
    return fmean(event.metrics["timing_s/step"] for event in events[warm_up(spec, steps) :])


def repeat(models: Path, folders: dict[str, Path], steps: int) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
    """Every setting once; measured seconds by setting, and predicted ones by pair."""
    measured = {name: measure(name, models, folder, steps) for name, folder in folders.items()}
    predicted: dict[tuple[str, str], float] = {}
    for recorded in dict.fromkeys(recorded for recorded, _ in PAIRS):
        changes = [change_to(target) for each, target in PAIRS if each == recorded]
        predicted |= {(recorded, target): step_s for target, step_s in predict(folders[recorded], changes).items()}
    return measured, predicted


def results_of(repeated: list[tuple[dict[str, float], dict[tuple[str, str], float]]]) -> list[Result]:
    """Measured times, predicted times, and errors (predicted ÷ measured − 1, repetition by repetition)."""
    results = [Result.of(f"{name}/step_s", "s", [measured[name] for measured, _ in repeated]) for name in SETTINGS]
    for a, b in PAIRS:
        values = [(predicted[a, b], measured[b]) for measured, predicted in repeated]
        results.append(Result.of(f"{a} → {b}/step_s", "s", [one for one, _ in values]))
        results.append(Result.of(f"{a} → {b}/error", "share", [one / real - 1 for one, real in values]))
    return results


def show(results: list[Result]) -> None:
    """The pairs as a table."""
    named = {result.name: result for result in results}
    print(f"{'recorded':16} {'predicted':16} {'ms':>7} {'measured':>9} {'error':>7}  min … max")
    for a, b in PAIRS:
        error, times = named[f"{a} → {b}/error"], [1e3 * named[name].median for name in (f"{a} → {b}/step_s", f"{b}/step_s")]
        print(f"{a:16} {b:16} {times[0]:7.1f} {times[1]:9.1f} {error.median:+7.1%}  {error.min:+.1%} … {error.max:+.1%}")


def main() -> int:
    """Measure, predict, print, and write the benchmark format if requested. Exit status 1 if a median misses the target."""
    from examples.letters.prepare import Settings, prepare

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    machine, repeated = other_programs(), []
    with tempfile.TemporaryDirectory(prefix="oppo-bench-") as scratch:
        models = Path(scratch) / "models"
        prepare(models / "letters", Settings(), lambda share, activity: None)
        for number in range(options.repetitions):
            folders = {name: Path(scratch) / f"{number} {name}" for name in SETTINGS}
            repeated.append(repeat(models, folders, options.steps))
    results = results_of(repeated)
    show(results)
    settings = {"steps": options.steps, "repetitions": options.repetitions}
    write_results("predictions", machine, settings, results, options.json)
    complaints = [f"{r.name} is above {TARGET:.0%}" for r in results if r.name.endswith("/error") and abs(r.median) > TARGET]
    complaints += [machine.complaint] if machine.complaint else []
    print("\n".join(complaints), file=sys.stderr)
    return 1 if complaints else 0
