"""`oppo bench trl`: the engine against TRL's PPOTrainer, on the same checkpoint, the same lengths and the same threads."""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oppo_bench.document import Result
from oppo_bench.engine.engine_runner import EngineRunner
from oppo_bench.engine.memory import EngineMemory, free_bytes, heats, needed
from oppo_bench.engine.models import build_models, build_peer_models, published_models, round_trip_prompts
from oppo_bench.engine.race import Plan, Progress
from oppo_bench.engine.workload import LONGEST, VARIANTS, Load, build_spec, write_prompts
from oppo_bench.machine_load import LoadMonitor
from oppo_contract.spec import RunSpec

PATIENCE_S = 1800.0
GB = 1e9
# TRL's micro-batch: with 2, 4 and 16 rows per pass a step took the same processor time (within 1 %). Of a published model, with
# four rows of SmolLM2, it took 16 GB.
ROWS_A_PASS, PUBLISHED_ROWS_A_PASS = 4, 1
PEER = Path(__file__).with_name("peer.py")
TRL, OPPO, SEQUENTIAL, OWN = "trl", "oppo", "sequential", "oppo_own"
TRL_GRPO, GRPO, GRPO_SEQUENTIAL = "trl_grpo", "grpo", "grpo_sequential"
# Responses to each prompt, and the KL penalty in the loss.
GROUP, KL = 4, 0.01
GRPO_SETTINGS = {
    "algorithm": "grpo", "group_size": GROUP, "kl": {"coefficient": KL, "estimator": "k3+", "placement": "loss"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """One PPO step: wall time and trained response tokens."""

    seconds: float
    tokens: int


class PeerError(RuntimeError):
    """TRL's process died, was silent or failed; the message has its last lines."""


class Peer:
    """TRL's trainer in its own process and environment, idle between its turns."""

    def __init__(self, python: Path, config: dict[str, Any], folder: Path, name: str = TRL, script: Path = PEER) -> None:
        self.name = name
        folder.mkdir()
        file = folder / "config.json"
        file.write_text(json.dumps(config | {"out": str(folder / "out")}))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environ = kept | {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
        self._log = (folder / "log.txt").open("w+")
        self._process = subprocess.Popen(
            [str(python), "-P", str(script), str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environ, cwd=folder,
        )  # fmt: skip
        self._receive()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def step(self) -> Turn:
        """One step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        told = self._receive()
        return Turn(told["seconds"], told["tokens"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            silent = not selector.select(PATIENCE_S)
        line = "" if silent else self._process.stdout.readline()
        if not line:
            self._process.kill()
            self._log.seek(0)
            why = f"was silent for {PATIENCE_S:.0f} s" if silent else "died"
            raise PeerError(f"TRL's process {why}. Its last words:\n{self._log.read()[-2000:]}")
        told: dict[str, Any] = json.loads(line)
        return told


class Ours:
    """One of the engine's variants."""

    def __init__(self, name: str, contestant: EngineRunner) -> None:
        self.name = name
        self._contestant = contestant

    def step(self) -> Turn:
        """One step."""
        cost = self._contestant.step()
        return Turn(cost.seconds, cost.trained)

    def close(self) -> None:
        """End its processes."""
        self._contestant.close()


@dataclass(frozen=True, slots=True)
class Pythons:
    """Interpreters of TRL's environments: of the release with a PPOTrainer, and of today's for GRPO (None: without)."""

    ppo: Path
    grpo: Path | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """Named figures of a case, and in how many heats it was raced, because memory did not suffice for all at once."""

    results: list[Result]
    heats: int


def race(load: Load, plan: Plan, pythons: Pythons, monitor: LoadMonitor, progress: Progress) -> Figures:
    """TRL and the engine, in turn, PPO first and GRPO after it.

    Raises:
        PeerError: a process of TRL's failed, or one trainer alone needs more than the free memory.
    """
    blocks: dict[str, list[list[Turn]]] = defaultdict(list)
    most = 1
    for algorithm, python in (("ppo", pythons.ppo), ("grpo", pythons.grpo)):
        if python is None:
            continue
        with ExitStack() as files:
            progress("preparing weights and prompts")
            setup = prepare(load, plan, algorithm, python, files)
            planned = plan_heats(load.name, setup.memory(), free_bytes(load.device))
            most = max(most, len(planned))
            for names in planned:
                with ExitStack() as stack:
                    _take_turns(load, plan, setup.start(names, stack, progress), blocks, monitor, progress)
    return Figures(to_results(load.case, blocks), most)


def plan_heats(name: str, racers: dict[str, EngineMemory], free: int | None) -> list[list[str]]:
    """Names of the trainers that are alive together. Raises PeerError if one alone needs more than the free memory."""
    largest = max(needed([racer]) for racer in racers.values())
    if free is not None and largest > free:
        raise PeerError(f"{name}: a trainer needs about {largest / GB:.0f} GB, {free / GB:.0f} are free.")
    return heats(racers, free)


def _take_turns(
    load: Load,
    plan: Plan,
    racers: list[Peer | Ours],
    blocks: dict[str, list[list[Turn]]],
    monitor: LoadMonitor,
    progress: Progress,
) -> None:
    for racer in racers:
        if isinstance(racer, Peer):
            monitor.follow(racer.pid)
    for step in range(load.left_out):
        progress(f"step {step + 1} of the {load.left_out} that are left out")
        for racer in racers:
            if isinstance(racer, Ours) or step == load.left_out - 1:  # nothing of TRL's is deferred to later steps
                racer.step()
    for repetition in range(plan.repetitions):
        for racer in racers:
            blocks[racer.name].append([])
        for step in range(plan.steps):
            progress(f"repetition {repetition + 1} of {plan.repetitions}, step {step + 1} of {plan.steps}")
            for racer in racers:
                blocks[racer.name][-1].append(racer.step())
    monitor.sample()


@dataclass(frozen=True, slots=True)
class Setup:
    """The trainers of one algorithm: TRL's by its configuration, ours by name, each with its variant and spec."""

    load: Load
    plan: Plan
    peer: str
    python: Path
    config: dict[str, Any]
    lines: dict[str, tuple[str, RunSpec]]
    scratch: Path

    def memory(self) -> dict[str, EngineMemory]:
        """Estimated memory of each trainer, TRL's first."""
        ours = {name: EngineMemory.of(spec) for name, (_, spec) in self.lines.items()}
        return {self.peer: trl_memory(self.load, self.config, max(engine.working for engine in ours.values()))} | ours

    def start(self, names: list[str], stack: ExitStack, progress: Progress) -> list[Peer | Ours]:
        """Load these trainers; `stack` closes them."""
        racers: list[Peer | Ours] = []
        for name in names:
            progress(f"loading {name}")
            if name == self.peer:
                racers.append(Peer(self.python, self.config, self.scratch / name, name))
            else:
                variant, spec = self.lines[name]
                runner = EngineRunner(variant, spec, self.load.lengths, self.scratch / name, self.plan.threads)
                racers.append(Ours(name, runner))
            stack.callback(racers[-1].close)
        return racers


def prepare(load: Load, plan: Plan, algorithm: str, python: Path, stack: ExitStack) -> Setup:
    """Write the models and prompts of an algorithm's trainers; `stack` deletes the files."""
    scratch, seed = Path(tempfile.mkdtemp(prefix="oppo-bench-")), load.lengths.seed
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    prompts = write_prompts(scratch, seed, load.prompt_tokens)
    if load.model is None:
        shared = build_peer_models(load.size, scratch, seed)
    else:
        shared = published_models(load.model, scratch, seed)
        round_trip_prompts(prompts, load.model)
    lines = {
        name: (variant, build_spec(load, VARIANTS[variant], models, prompts, settings))
        for name, variant, models, settings in engine_lines(load, shared, scratch)
        if settings.get("algorithm", "ppo") == algorithm
    }
    config, peer = config_for_trl(load, plan, shared, prompts), TRL
    if algorithm == "grpo":
        config, peer = config | {"group": GROUP, "kl": KL}, TRL_GRPO
    return Setup(load, plan, peer, python, config, lines, scratch)


def trl_memory(load: Load, config: dict[str, Any], engine_pass: int) -> EngineMemory:
    """Memory of TRL's trainer; `engine_pass`: bytes that a pass of `micro_batch_tokens` takes in the engine.

    Besides its networks it keeps up to three copies of the logits of a batch with its prompts. Its PPO passes through policy and
    value model in one graph; its GRPO has no value model, and no reference model beside adapters.
    """
    networks, graphs = (2, 1) if "group" in config else (4, 2)
    logits = 4 * load.batch * load.context * load.size.vocab
    in_passes = config["rows_a_pass"] * load.context / load.size.micro_batch_tokens
    return EngineMemory(4 * networks * load.size.parameters + logits, 2 * logits + round(graphs * in_passes * engine_pass))


def engine_lines(load: Load, shared: dict[str, Any], scratch: Path) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Name, variant, models and PPO settings of each of the engine's lines."""
    if load.model is None:
        own = build_models(load.size, scratch, load.lengths.seed)
        return [(SEQUENTIAL, "sequential", shared, {}), (OPPO, "all", shared, {}), (OWN, "all", own, {})]
    without_critic = {role: model for role, model in shared.items() if role != "critic"}
    return [
        (SEQUENTIAL, "sequential", shared, {}),
        (OPPO, "all", shared, {}),
        (GRPO_SEQUENTIAL, "sequential", without_critic, GRPO_SETTINGS),
        (GRPO, "both", without_critic, GRPO_SETTINGS),
    ]


def config_for_trl(load: Load, plan: Plan, shared: dict[str, Any], prompts: Path) -> dict[str, Any]:
    """What TRL's processes read. They leave out one step, the last of those that ours leave out."""
    first, steps = load.left_out - 1, load.left_out + plan.repetitions * plan.steps
    listed = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    rows = min(ROWS_A_PASS if load.model is None else PUBLISHED_ROWS_A_PASS, load.batch)
    config = {
        "actor": shared["actor"]["path"], "reward": shared["reward"]["model"]["path"], "batch": load.batch,
        "seed": load.lengths.seed, "prompts": listed,
        "rows_a_pass": rows, "threads": plan.threads, "longest": LONGEST,
        "lengths": [load.lengths.of(number) for number in range(first * load.batch, steps * load.batch)],
    }  # fmt: skip
    return config if load.model is None else config | {"lora": shared["lora"]["rank"]}


def to_results(case: str, blocks: dict[str, list[list[Turn]]]) -> list[Result]:
    """Time per token and per step, and speed-up over TRL's trainer of the same algorithm, per repetition."""
    results: list[Result] = []
    for name, measured in blocks.items():
        token = [_us_per_token(block) for block in measured]
        results.append(Result.of(f"{case}/{name}/us_per_token", "us", token))
        per_step = [1e6 * sum(turn.seconds for turn in block) / len(block) for block in measured]
        results.append(Result.of(f"{case}/{name}/us_per_step", "us", per_step))
        peer = blocks.get(TRL_GRPO if "grpo" in name else TRL)
        if peer is not None:
            ratios = [_us_per_token(theirs) / ours for theirs, ours in zip(peer, token, strict=True)]
            results.append(Result.of(f"{case}/{name}/speedup", "ratio", ratios))
    return results


def _us_per_token(block: list[Turn]) -> float:
    return 1e6 * sum(turn.seconds for turn in block) / sum(turn.tokens for turn in block)
