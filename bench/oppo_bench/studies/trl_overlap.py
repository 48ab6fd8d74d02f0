"""Gain of our overlap in TRL's PPOTrainer: `build/trl/bin/python bench/trl_overlap.py [--json FILE]` after `make test-trl`.

Three trainers of the work of `oppo bench trl`, each in its own process, one step at a time in turn: TRL alone, with streamed
reward prefill (Δ = 0), and with Δ = B/2 as well. Answers have the same fixed lengths everywhere; EOS is written where they end
and
nowhere else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "trl_overlap.py"
TRL, STREAMED, DEFERRED = "trl", "streamed", "deferred"
CHUNK, MAX_AGE = 16, 3


def train(config: dict[str, Any]) -> None:
    """Body of a trainer's process: one step per message."""
    import torch

    from oppo_bench.trl.peer import TurnByTurn, Work, build_trainer
    from oppo_core.integrations import trl

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep the libraries' output out of the result
    torch.set_num_threads(config["threads"])
    work = Work(config)
    trainer = build_trainer(config, work, TurnByTurn(work, sys.stdin, answers))
    amounts = config["overlap"]
    with trl.overlap(trainer, **amounts) if amounts else nullcontext() as rollouts:
        if rollouts is not None:
            fix_lengths(rollouts, work)
        trainer.train()


def fix_lengths(rollouts: Any, work: Any) -> None:
    """Let answers end at their fixed lengths, and report the tokens of each batch."""
    own = rollouts.next

    def is_finished(sequence: Any) -> bool:
        token = sequence.response[-1]
        sequence.finished = sequence.ended_by_eos = sequence.length >= work.lengths[sequence.sequence_id]
        eos = rollouts._decoder.settings.eos
        sequence.response[-1] = eos if sequence.finished else 3 if token == eos else token
        return bool(sequence.finished)

    def batch() -> Any:
        rollout = own()
        work.tokens = sum(sequence.length for sequence in rollout.sequences)
        return rollout

    rollouts._decoder._is_finished, rollouts.next = is_finished, batch


def race(repetitions: int, steps: int, threads: int, seed: int) -> tuple[dict[str, Any], list[Any], Any]:
    """Settings and figures, and how quiet the machine was."""
    from oppo_bench.document import Result
    from oppo_bench.engine.workload import SIZES, Lengths, Load
    from oppo_bench.machine_load import LoadMonitor
    from oppo_bench.trl.race import Turn, to_results

    load = replace(Load("M", SIZES["M"], 16, Lengths(seed)), max_age=MAX_AGE, chunk=CHUNK)
    blocks: dict[str, list[list[Turn]]] = defaultdict(list)
    processor: dict[str, list[float]] = defaultdict(list)
    monitor = LoadMonitor()
    with ExitStack() as stack:
        racers = peers(load, load.left_out + repetitions * steps, threads, stack)
        for racer in racers:
            monitor.follow(racer.pid)
        for racer in racers * load.left_out:
            racer.step()
        for _ in range(repetitions):
            before = {racer.name: used_s(racer.pid) for racer in racers}
            for racer in racers:
                blocks[racer.name].append([])
            for racer in racers * steps:
                blocks[racer.name][-1].append(racer.step())
            for racer in racers:
                spent, tokens = used_s(racer.pid) - before[racer.name], sum(turn.tokens for turn in blocks[racer.name][-1])
                processor[racer.name].append(1e6 * spent / tokens)
        monitor.sample()
    settings = {"size": "M", "batch": load.batch, "overlap": variants(load), "threads": threads, "seed": seed}
    settings |= {"repetitions": repetitions, "steps": steps, "left_out": load.left_out}
    results = to_results(load.case, blocks)
    results += [Result.of(f"{load.case}/{name}/processor_us_per_token", "us", values) for name, values in processor.items()]
    return settings, results, monitor.machine()


def variants(load: Any) -> dict[str, dict[str, int] | None]:
    """What each trainer overlaps, by name."""
    streamed = {"overcommit": 0, "chunk": CHUNK}
    return {TRL: None, STREAMED: streamed, DEFERRED: streamed | {"overcommit": load.overcommit, "max_age": MAX_AGE}}


def peers(load: Any, steps: int, threads: int, stack: ExitStack) -> list[Any]:
    """The trainers' processes, which `stack` ends."""
    from oppo_bench.engine.models import build_peer_models
    from oppo_bench.engine.workload import LONGEST, write_prompts
    from oppo_bench.trl.race import ROWS_A_PASS, Peer

    scratch, seed = Path(tempfile.mkdtemp(prefix="oppo-bench-")), load.lengths.seed
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    models, prompts = build_peer_models(load.size, scratch, seed), write_prompts(scratch, seed)
    config = {
        "actor": models["actor"]["path"], "reward": models["reward"]["model"]["path"], "batch": load.batch, "seed": seed,
        "rows_a_pass": ROWS_A_PASS, "threads": threads, "longest": LONGEST,
        "prompts": [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()],
        "lengths": [load.lengths.of(number) for number in range((steps + 1) * load.batch)],
    }  # fmt: skip
    racers = []
    for name, amounts in variants(load).items():
        racers.append(Peer(Path(sys.executable), config | {"overlap": amounts}, scratch / name, name, SCRIPT))
        stack.callback(racers[-1].close)
    return racers


def used_s(pid: int) -> float:
    """Processor time of a process so far, all its threads together."""
    import psutil

    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Race, print the figures, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.config is not None:
        train(json.loads(options.config.read_text()))
        return
    from oppo_bench.document import document, write

    settings, results, machine = race(options.reps, options.steps, options.threads, seed=0)
    print(f"{machine}; {options.reps} repetitions of {options.steps} steps each, in turn")
    for result in results:
        print(f"{result.name:32} median {result.median:12.3f}  {result.min:12.3f} to {result.max:12.3f} {result.unit}")
    if options.json is not None:
        write(options.json, document("trl_overlap", machine, settings, results))
