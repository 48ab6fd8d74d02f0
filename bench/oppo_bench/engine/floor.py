"""The floor: the cost of a token if every stage runs at its best and no core ever waits.

Each stage is measured on all cores in two ways, and the faster one counts: one process with all threads, and one process per core
at the same time. Decoding is measured with all B rows live at the positions of a refilled batch; scoring and training by the
engine's sequential step over whole batches of given answers.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oppo_bench.engine.engine_runner import RecordingJournal, finish_queued_work
from oppo_bench.engine.fixed_lengths import EndlessDecoder, FixedLengthDecoder, fix_lengths
from oppo_bench.engine.workload import LONGEST, VOCAB, Load
from oppo_contract.spec import RunSpec
from oppo_core.engine import step_report
from oppo_core.engine.build import assemble
from oppo_core.engine.state import Engine
from oppo_core.rollout.sequence import Sequence
from oppo_core.train import train_step

BATCHES, PUBLISHED_BATCHES = 3, 1  # Batches trained in each measurement, always the same; of a published model.
ROUNDS = 24
PATIENCE_S = 600.0
STAGE_OF = {
    "reward-prefill": "reward", "reference-prefill": "reference", "critic-prefill": "critic",
    "actor-forward": "update_actor", "update-actor": "update_actor", "update-critic": "update_critic",
}  # fmt: skip
STAGES = ("decode", *dict.fromkeys(STAGE_OF.values()))
Costs = dict[str, float]  # stage → microseconds per token


class GivenAnswers(FixedLengthDecoder):
    """A decoder without cost: answers of the fixed lengths, made of random tokens, are complete at once."""

    batches: int

    def begin(self, sequences: list[Sequence], version: int = 0) -> int:
        self.live = list(sequences)
        return 0

    def advance(self, rounds: int, version: int) -> tuple[list[Sequence], int]:
        """Every answer is complete at once; answers repeat every `batches` steps."""
        for sequence in self.live:
            number = sequence.sequence_id % (self.batches * len(self.live))
            count = self.lengths.of(number)
            drawn = np.random.Generator(np.random.Philox(key=[self.lengths.seed + 1, number]))
            sequence.response = drawn.integers(3, VOCAB, count).tolist()
            sequence.behaviour_logprobs = [-float(np.log(VOCAB))] * count
            sequence.token_versions = [version] * count
            sequence.finished = sequence.ended_by_eos = True
        done, self.live = self.live, []
        return done, 1


class Meter:
    """A sequential engine in one process, and the cost of its stages on its threads."""

    def __init__(self, spec: RunSpec, load: Load, out: Path, threads: int) -> None:
        self._journal = RecordingJournal(out / "events.jsonl")
        self._engine: Engine = assemble(spec, [], out, self._journal, threads)
        self._threads, self._load = threads, load
        self._decoder = fix_lengths(self._engine, load.lengths, EndlessDecoder)
        self._batches = BATCHES if load.model is None else PUBLISHED_BATCHES
        given = fix_lengths(self._engine, load.lengths, GivenAnswers)
        assert isinstance(given, GivenAnswers)
        given.batches = self._batches
        step_report.started(self._engine)

    def measure(self) -> Costs:
        """Microseconds per token of every stage in this process."""
        spent: dict[str, float] = defaultdict(float)
        tokens = 0
        for _ in range(self._batches):
            train_step(self._engine, self._engine.clock())
            tokens += int(self._journal.newest["step"]["metrics"]["perf/total_num_tokens"])
            for stage, seconds in _spans(self._journal.newest["spans"]):
                spent[stage] += seconds
        costs = {stage: 1e6 * seconds / tokens for stage, seconds in spent.items()}
        return costs | {"decode": 1e6 * self._decode_s() / (ROUNDS * self._load.batch)}

    def _decode_s(self) -> float:
        torch.set_num_threads(self._threads)
        self._decoder.begin([self._half_written(row) for row in range(self._load.batch)])
        finish_queued_work(self._engine)
        start = time.perf_counter()
        for _ in range(ROUNDS):
            self._decoder.round(0)
        finish_queued_work(self._engine)
        seconds = time.perf_counter() - start
        self._decoder.pause()
        return seconds

    def _half_written(self, row: int) -> Sequence:
        """Number of tokens that a row has at a random moment: long answers are more frequent because they stay longer."""
        lengths = np.array([self._load.lengths.of(number) for number in range(1024)])
        drawn = np.random.Generator(np.random.Philox(key=[self._load.lengths.seed + 2, row]))
        written = int(drawn.choice(lengths, p=lengths / lengths.sum()) * drawn.random())
        written = min(written, LONGEST - ROUNDS)
        sequence = Sequence(row, 0, self._engine.prompts.prompts[row % len(self._engine.prompts.prompts)])
        sequence.response = drawn.integers(3, VOCAB, written).tolist()
        sequence.behaviour_logprobs, sequence.token_versions = [0.0] * written, [0] * written
        return sequence

    def close(self) -> None:
        self._engine.scorers.close()
        self._journal.close()


def _spans(costs: dict[str, Any]) -> list[tuple[str, float]]:
    """(stage, seconds) of a step's spans on its first device; all devices do the same work."""
    first = costs["device"][0]
    rows = zip(costs["device"], costs["phase"], costs["start_s"], costs["end_s"], strict=True)
    return [(STAGE_OF[phase], end - start) for device, phase, start, end in rows if device == first and phase in STAGE_OF]


@dataclass(frozen=True, slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection

    def receive(self) -> Costs:
        """Receive a result from the process. Raises RuntimeError when it died or is silent."""
        if not self.connection.poll(PATIENCE_S):
            raise RuntimeError(f"a process of the floor's measurement was silent for {PATIENCE_S:.0f} s")
        try:
            costs: Costs = self.connection.recv()
        except EOFError:
            raise RuntimeError("a process of the floor's measurement died; its last words are above") from None
        return costs


class Floor:
    """Measures the floor of one case; its processes wait between measurements."""

    def __init__(self, spec: RunSpec, load: Load, out: Path, threads: int) -> None:
        self._together = Meter(spec, load, out / "together", threads)
        alone = threads if load.device == "cpu" and threads > 1 else 0
        self._workers = [_start(partial(Meter, spec, load, out / f"core-{core}", 1)) for core in range(alone)]

    def measure(self) -> Costs:
        """Microseconds per token of every stage, the faster way of each."""
        best = self._together.measure()
        for worker in self._workers:
            worker.connection.send("measure")
        costs = [worker.receive() for worker in self._workers]
        for stage in STAGES if costs else ():
            # n cores process n tokens at a time.
            best[stage] = min(best[stage], float(np.mean([costs[stage] for costs in costs])) / len(costs))
        return best

    def close(self) -> None:
        self._together.close()
        for worker in self._workers:
            worker.connection.close()
            worker.process.join(timeout=5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()


def _start(make: partial[Meter]) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make), name="oppo-bench-floor", daemon=True)
    process.start()
    theirs.close()
    worker = _Worker(process, ours)
    worker.receive()
    return worker


def _serve(connection: Connection, make: partial[Meter]) -> None:
    """Body of a process: one measurement per message, until the pipe closes."""
    meter = make()
    connection.send({})
    while True:
        try:
            connection.recv()
        except EOFError:
            meter.close()
            return
        connection.send(meter.measure())
