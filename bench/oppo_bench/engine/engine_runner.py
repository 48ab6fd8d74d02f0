"""A variant of the benchmark: a real engine that stays alive between its turns, and the cost of its steps."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from oppo_bench.engine.fixed_lengths import FixedLengthDecoder, PaddedDecoder, fix_lengths, fix_vllm_lengths
from oppo_bench.engine.padding import unsorted
from oppo_bench.engine.workload import Lengths
from oppo_contract.spec import RunSpec
from oppo_core.engine import step_report
from oppo_core.engine.build import assemble
from oppo_core.engine.state import Engine
from oppo_core.reporting.event_log import Journal
from oppo_core.rollout.decoder import Decoder
from oppo_core.train import train_step


class RecordingJournal(Journal):
    """An event log that also keeps the newest payload of each kind of event."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.newest: dict[str, dict[str, Any]] = {}

    def write(self, kind: str, at: float | None = None, **payload: Any) -> None:
        self.newest[kind] = payload
        super().write(kind, at, **payload)


@dataclass(frozen=True, slots=True)
class StepCost:
    """One PPO step: wall time, trained and decoded response tokens, and metrics of the engine."""

    seconds: float
    trained: int
    decoded: int
    bubble: float
    overlap_factor: float
    decode_occupancy: float
    deferred_share: float


@dataclass(frozen=True, slots=True)
class Block:
    """The steps of one repetition."""

    steps: list[StepCost]

    @property
    def us_per_token(self) -> float:
        """Microseconds per trained response token."""
        return 1e6 * self.seconds / sum(step.trained for step in self.steps)

    @property
    def us_per_step(self) -> float:
        """Microseconds per PPO step."""
        return 1e6 * self.seconds / len(self.steps)

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def decoded_share(self) -> float:
        """Decoded tokens ÷ trained tokens: about 1 if the number of unfinished answers is stable."""
        return sum(step.decoded for step in self.steps) / sum(step.trained for step in self.steps)

    def mean(self, name: str) -> float:
        """Mean of a share over the steps, weighted by their time."""
        return float(sum(getattr(step, name) * step.seconds for step in self.steps) / self.seconds)


class EngineRunner:
    """An engine in processes of its own, with fixed answer lengths."""

    def __init__(self, name: str, spec: RunSpec, lengths: Lengths, out: Path, threads: int) -> None:
        self.name = name
        self.journal = RecordingJournal(out / "events.jsonl")
        self.engine: Engine = assemble(spec, [], out, self.journal, threads)
        self._padded = name == "padded"
        self.decoder_kind = type(self.engine.decoder)  # chosen by the engine
        if isinstance(self.engine.decoder, Decoder):
            fix_lengths(self.engine, lengths, PaddedDecoder if self._padded else FixedLengthDecoder)
        else:
            fix_vllm_lengths(self.engine, lengths)
        step_report.started(self.engine)

    def step(self) -> StepCost:
        """Train one step as in a run, and wait for the device."""
        with unsorted() if self._padded else nullcontext():
            start = time.perf_counter()
            train_step(self.engine, self.engine.clock())
            finish_queued_work(self.engine)
            seconds = time.perf_counter() - start
        metrics: dict[str, float] = self.journal.newest["step"]["metrics"]
        return StepCost(
            seconds, int(metrics["perf/total_num_tokens"]), self.engine.decoder.decoded,
            bubble=fmean(metrics[f"bubble/{device}"] for device in self.engine.layout.devices),
            overlap_factor=metrics["overlap_factor"], decode_occupancy=metrics.get("decode_occupancy", 1.0),
            deferred_share=metrics["oppo/deferred_token_share"],
        )  # fmt: skip

    def close(self) -> None:
        """End its processes and free its memory."""
        release(self.engine)
        self.journal.close()


def finish_queued_work(engine: Engine) -> None:
    """Wait for the GPU's queue."""
    if engine.layout.devices[0].startswith("cuda"):
        torch.cuda.synchronize()


def release(engine: Engine) -> None:
    """End an engine's processes and free its memory; the engine cannot be used any more."""
    engine.scorers.close()
    engine.decoder.close()
    engine.hardware.close()
    for name in ("scorers", "decoder", "actor", "update"):
        setattr(engine, name, None)
    gc.collect()
    if engine.layout.devices[0].startswith("cuda"):
        torch.cuda.empty_cache()
