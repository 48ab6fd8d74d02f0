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
from oppo_bench.engine.engine_runner import Block, Contestant, StepCost
from oppo_bench.engine.floor import Costs, Floor
from oppo_bench.engine.memory import heats
from oppo_bench.engine.models import models_of
from oppo_bench.engine.workload import CPU_ONLY, FLOOR, VARIANTS, Load, spec_of, write_prompts
from oppo_bench.machine_load import Watch

Tell = Callable[[str], None]
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
class Scene:
    """Shared by all variants of a case: the models section, the prompts and a scratch folder."""

    load: Load
    models: dict[str, Any]
    prompts: Path
    folder: Path


def race(load: Load, plan: Plan, watch: Watch, tell: Tell) -> Measured:
    """Run one case, the variants' steps in turn, and return their costs.

    Engines stay alive at the same time, so that all see the same state of the machine; only one works at a time. If
    memory is too
    small for all of them, they run in heats. Scratch files are deleted at the end.
    """
    folder = Path(tempfile.mkdtemp(prefix="oppo-bench-"))
    measured = Measured(load)
    try:
        tell("preparing weights and prompts")
        seed = load.lengths.seed
        scene = Scene(load, models_of(load.size, folder, seed), write_prompts(folder, seed), folder)
        planned = heats(plan.variants_on(load.device), load, plan.threads)
        measured.heats = len(planned)
        for names in planned:
            _run_heat(scene, plan, names, measured, watch, tell)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return measured


def _run_heat(scene: Scene, plan: Plan, names: list[str], measured: Measured, watch: Watch, tell: Tell) -> None:
    with ExitStack() as stack:
        contestants = _contestants(scene, plan, names, stack, tell)
        floor = _floor(scene, plan, stack, tell) if FLOOR in names else None
        for step in range(scene.load.left_out):
            tell(f"step {step + 1} of the {scene.load.left_out} that are left out")
            for contestant in contestants:
                contestant.step()
        for repetition in range(plan.repetitions):
            costs: dict[str, list[StepCost]] = defaultdict(list)
            for step in range(plan.steps):
                tell(f"repetition {repetition + 1} of {plan.repetitions}, step {step + 1} of {plan.steps}")
                for contestant in contestants:
                    costs[contestant.name].append(contestant.step())
            for name, steps in costs.items():
                measured.blocks[name].append(Block(steps))
            if floor is not None:
                measured.floor.append(floor.measure())
        watch.look()


def _contestants(scene: Scene, plan: Plan, names: list[str], stack: ExitStack, tell: Tell) -> list[Contestant]:
    contestants = []
    for name in names:
        if name == FLOOR:
            continue
        tell(f"assembling {name}")
        spec = spec_of(scene.load, VARIANTS[name], scene.models, scene.prompts)
        contestant = Contestant(name, spec, scene.load.lengths, scene.folder / name, plan.threads)
        stack.callback(contestant.close)
        contestants.append(contestant)
    return contestants


def _floor(scene: Scene, plan: Plan, stack: ExitStack, tell: Tell) -> Floor:
    tell("assembling the floor's measurement")
    spec = spec_of(scene.load, VARIANTS["sequential"], scene.models, scene.prompts)
    floor = Floor(spec, scene.load, scene.folder / FLOOR, plan.threads)
    stack.callback(floor.close)
    floor.measure()  # warm
    return floor


def results_of(measured: Measured) -> list[Result]:
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
