"""`oppo bench engine`: every way to overlap the work, on the same work, in one run; and how far each is from the floor."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from oppo_bench.contestant import Block, Contestant, StepCost
from oppo_bench.document import Result
from oppo_bench.floor import Costs, Floor
from oppo_bench.models import models_of
from oppo_bench.quiet import Watch
from oppo_bench.workload import CPU_ONLY, FLOOR, VARIANTS, Load, spec_of, write_prompts

Tell = Callable[[str], None]
SHARES = {"bubble": "share", "overlap_factor": "ratio", "decode_occupancy": "share", "deferred_share": "share"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `repetitions` of `steps` PPO steps each, on `threads` cores."""

    repetitions: int
    steps: int
    threads: int
    variants: tuple[str, ...] = (*VARIANTS, FLOOR)

    def variants_on(self, device: str) -> list[str]:
        """Those that a device can run."""
        return [name for name in self.variants if name != FLOOR and (device == "cpu" or name not in CPU_ONLY)]


@dataclass(slots=True)
class Measured:
    """One case: a block of steps a variant and repetition, and the floor's stages a repetition."""

    load: Load
    blocks: dict[str, list[Block]] = field(default_factory=lambda: defaultdict(list))
    floor: list[Costs] = field(default_factory=list)


def race(load: Load, plan: Plan, watch: Watch, tell: Tell) -> Measured:
    """Run one case, the variants' steps in turn, and return what they cost.

    Engines stay alive side by side, so that all meet the same moments of the machine; only one works at a time. Scratch
    files are deleted at the end.
    """
    scratch = Path(tempfile.mkdtemp(prefix="oppo-bench-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        contestants, floor = _assemble(load, plan, scratch, stack, tell)
        for step in range(load.left_out):
            tell(f"step {step + 1} of the {load.left_out} that are left out")
            for contestant in contestants:
                contestant.step()
        measured = Measured(load)
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
    return measured


def _assemble(load: Load, plan: Plan, scratch: Path, stack: ExitStack, tell: Tell) -> tuple[list[Contestant], Floor | None]:
    """Every engine of a case; `stack` closes them."""
    tell("preparing weights and prompts")
    models, prompts = models_of(load.size, scratch, load.lengths.seed), write_prompts(scratch, load.lengths.seed)
    contestants = []
    for name in plan.variants_on(load.device):
        tell(f"assembling {name}")
        contestant = Contestant(name, spec_of(load, VARIANTS[name], models, prompts), load.lengths, scratch / name, plan.threads)
        stack.callback(contestant.close)
        contestants.append(contestant)
    if FLOOR not in plan.variants:
        return contestants, None
    tell("assembling the floor's measurement")
    floor = Floor(spec_of(load, VARIANTS["sequential"], models, prompts), load, scratch / FLOOR, plan.threads)
    stack.callback(floor.close)
    floor.measure()  # warm
    return contestants, floor


def results_of(measured: Measured) -> list[Result]:
    """Named figures of a case; ratios are taken within each repetition, whose variants met the same machine."""
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
