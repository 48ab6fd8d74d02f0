"""`oppo bench engine`: every variant on the same work in one run, and the distance of each from the floor."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oppo_bench.document import Result
from oppo_bench.engine.engine_runner import Block, EngineRunner, StepCost
from oppo_bench.engine.floor import Costs, Floor
from oppo_bench.engine.memory import EngineMemory, free_bytes, heats
from oppo_bench.engine.models import build_models, published_models
from oppo_bench.engine.workload import CPU_ONLY, FLOOR, VARIANTS, Load, build_spec, write_prompts
from oppo_bench.machine_load import LoadMonitor

Progress = Callable[[str], None]
SHARES = {"bubble": "share", "overlap_factor": "ratio", "decode_occupancy": "share", "deferred_share": "share"}


@dataclass(frozen=True, slots=True)
class Plan:
    """Amount of measurement: `repetitions` of `steps` PPO steps each, on `threads` cores."""

    repetitions: int
    steps: int
    threads: int
    variants: tuple[str, ...] = (*VARIANTS, FLOOR)

    def variants_on(self, device: str) -> list[str]:
        """Variants that the device can run."""
        return [name for name in self.variants if device == "cpu" or name not in CPU_ONLY]


@dataclass(slots=True)
class Measured:
    """Results of one case: a block of steps per variant and repetition, and the floor's stages per repetition."""

    load: Load
    blocks: dict[str, list[Block]] = field(default_factory=lambda: defaultdict(list))
    floor: list[Costs] = field(default_factory=list)
    heats: int = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """Shared by all variants of a case: the models section, the prompts and a scratch folder."""

    load: Load
    models: dict[str, Any]
    prompts: Path
    folder: Path


def race(load: Load, plan: Plan, monitor: LoadMonitor, progress: Progress) -> Measured:
    """Run one case, the variants' steps in turn, and return their costs.

    Engines stay alive at the same time, so that all see the same state of the machine; only one works at a time. If
    memory is too
    small for all of them, they run in heats. Scratch files are deleted at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="oppo-bench-"))
    measured = Measured(load)
    try:
        progress("preparing weights and prompts")
        seed = load.lengths.seed
        model = load.model
        models = build_models(load.size, folder, seed) if model is None else published_models(model, folder, seed)
        setup = Setup(load, models, write_prompts(folder, seed, load.prompt_tokens), folder)
        planned = heats(_memory(setup, plan), free_bytes(load.device))
        measured.heats = len(planned)
        for names in planned:
            _run_heat(setup, plan, names, measured, monitor, progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return measured


def _memory(setup: Setup, plan: Plan) -> dict[str, EngineMemory]:
    """Memory of every variant that the device can run, and of the floor's measurement."""
    engines = {}
    for name in plan.variants_on(setup.load.device):
        overlap = VARIANTS["sequential" if name == FLOOR else name]
        engines[name] = EngineMemory.of(build_spec(setup.load, overlap, setup.models, setup.prompts))
        if name == FLOOR and setup.load.device == "cpu":
            engines[name] = engines[name].of_floor(plan.threads)
    return engines


def _run_heat(setup: Setup, plan: Plan, names: list[str], measured: Measured, monitor: LoadMonitor, progress: Progress) -> None:
    with ExitStack() as stack:
        runners = _build_runners(setup, plan, names, stack, progress)
        floor = _floor(setup, plan, stack, progress) if FLOOR in names else None
        for step in range(setup.load.left_out):
            progress(f"step {step + 1} of the {setup.load.left_out} that are left out")
            for runner in runners:
                runner.step()
        for repetition in range(plan.repetitions):
            costs: dict[str, list[StepCost]] = defaultdict(list)
            for step in range(plan.steps):
                progress(f"repetition {repetition + 1} of {plan.repetitions}, step {step + 1} of {plan.steps}")
                for runner in runners:
                    costs[runner.name].append(runner.step())
            for name, steps in costs.items():
                measured.blocks[name].append(Block(steps))
            if floor is not None:
                measured.floor.append(floor.measure())
        monitor.sample()


def _build_runners(setup: Setup, plan: Plan, names: list[str], stack: ExitStack, progress: Progress) -> list[EngineRunner]:
    runners = []
    for name in names:
        if name == FLOOR:
            continue
        progress(f"assembling {name}")
        spec = build_spec(setup.load, VARIANTS[name], setup.models, setup.prompts)
        runner = EngineRunner(name, spec, setup.load.lengths, setup.folder / name, plan.threads)
        stack.callback(runner.close)
        runners.append(runner)
    return runners


def _floor(setup: Setup, plan: Plan, stack: ExitStack, progress: Progress) -> Floor:
    progress("assembling the floor's measurement")
    spec = build_spec(setup.load, VARIANTS["sequential"], setup.models, setup.prompts)
    floor = Floor(spec, setup.load, setup.folder / FLOOR, plan.threads)
    stack.callback(floor.close)
    if setup.load.model is None:  # whose measurement takes many minutes
        floor.measure()  # warm
    return floor


def to_results(measured: Measured) -> list[Result]:
    """Named figures of a case; ratios are computed within each repetition."""
    load = measured.load
    case = load.case
    floor = [sum(costs.values()) for costs in measured.floor]
    sequential = [block.us_per_token for block in measured.blocks.get("sequential", [])]
    results: list[Result] = []
    for name, blocks in measured.blocks.items():
        token = [block.us_per_token for block in blocks]
        results.append(Result.of(f"{case}/{name}/us_per_token", "us", token))
        results.append(Result.of(f"{case}/{name}/us_per_step", "us", [block.us_per_step for block in blocks]))
        for share, unit in SHARES.items():
            results.append(Result.of(f"{case}/{name}/{share}", unit, [block.mean(share) for block in blocks]))
        results.append(Result.of(f"{case}/{name}/decoded_per_trained", "ratio", [block.decoded_share for block in blocks]))
        if sequential:
            ratios = [base / own for base, own in zip(sequential, token, strict=True)]
            results.append(Result.of(f"{case}/{name}/speedup", "ratio", ratios))
        if floor:
            ratios = [own / least for own, least in zip(token, floor, strict=True)]
            results.append(Result.of(f"{case}/{name}/to_floor", "ratio", ratios))
    if floor:
        results.append(Result.of(f"{case}/{FLOOR}/us_per_token", "us", floor))
        for stage in measured.floor[0]:
            costs = [costs[stage] for costs in measured.floor]
            results.append(Result.of(f"{case}/{FLOOR}/{stage}/us_per_token", "us", costs))
        if sequential:
            ratios = [base / least for base, least in zip(sequential, floor, strict=True)]
            results.append(Result.of(f"{case}/{FLOOR}/speedup", "ratio", ratios))
    return results
