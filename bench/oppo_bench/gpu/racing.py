"""The race of one cell: engines in one process, their steps in turn, until the cell's time is used up."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from oppo_bench.engine.engine_runner import EngineRunner
from oppo_bench.engine.workload import CONTEXT, Load, build_spec
from oppo_bench.gpu.cases import BASE, BY_IMPORTANCE, OVERLAP, VLLM, Cell
from oppo_bench.gpu.floor import Work
from oppo_bench.gpu.random_models import ModelSet
from oppo_bench.gpu.step_profile import StepProfile, profile_step
from oppo_core.engine.layout import Layout
from oppo_core.rollout.decoder import Decoder
from oppo_core.rollout.device_decoder import DeviceDecoder
from oppo_core.scoring.thread import ThreadedScorers
from oppo_core.trace.gpu_stats import GpuStats
from oppo_core.trace.recorder import Recorder

# Typed as Any because imported names are replaced.
engines: Any = import_module("oppo_core.engine.build")
Progress = Callable[[str], None]
GB = 1e9
ROOM = 0.85  # share of free memory for caches


class Clock:
    """Remaining time of the whole command."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step: wall time, trained tokens, metrics of the engine and the driver, and its work."""

    seconds: float
    trained: int
    metrics: dict[str, float]
    driver: dict[str, float]
    work: Work
    peak_bytes: int


@dataclass(slots=True)
class Race:
    """Steps by variant and repetition, and the engine parts in use."""

    cell: Cell
    load: Load
    blocks: dict[str, list[list[Step]]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, str] = field(default_factory=dict)  # variant → its decoder and scorers
    kind: type[Decoder] = Decoder  # the decoder that the engine chose for the device
    first: dict[str, int] = field(default_factory=dict)  # variant → the base's repetitions before its own heat's
    left_out: list[str] = field(default_factory=list)
    profiles: dict[str, StepProfile] = field(default_factory=dict)  # by variant


@contextmanager
def all_on_one_device() -> Iterator[None]:
    """Within the block a CPU uses the GPU's layout: one process and device, device-resident decoder, scorers in a thread."""
    build_layout, remote, build_decoder = engines.build_layout, engines.ProcessScorers, engines.build_decoder

    def as_on_a_gpu(spec: Any, device: Any, threads: int, hidden: int, named: Any = str) -> Layout:
        laid_out: Layout = build_layout(spec, torch.device("cuda", 0), threads, hidden, lambda _: "cpu:0")
        return laid_out

    def in_this_process(build: Any, devices: Any, threads: int, trace: Recorder, silence: float) -> ThreadedScorers:
        return ThreadedScorers(build, Recorder(devices), torch.device("cpu"), trace, silence)

    def on_the_device(actor: Any, settings: Any, slots: int, stops: Any = None) -> Decoder:
        kind = DeviceDecoder if settings.filters is None else Decoder
        return kind(actor, settings, slots, stops)

    engines.build_layout, engines.ProcessScorers, engines.build_decoder = as_on_a_gpu, in_this_process, on_the_device
    try:
        yield
    finally:
        engines.build_layout, engines.ProcessScorers, engines.build_decoder = build_layout, remote, build_decoder


class Variant:
    """A variant with an engine of its own; all variants train the same actor and critic in turn."""

    def __init__(self, name: str, race: Race, models: ModelSet, prompts: Path, folder: Path, threads: int) -> None:
        spec = build_spec(race.load, OVERLAP[name], models.models(), prompts)
        if name == VLLM:
            models.write_weights()
            rollout = spec.rollout.model_copy(update={"backend": "vllm"})
            spec = spec.model_copy(update={"rollout": rollout})
        self.name = name
        with models.serving():
            self.contestant = EngineRunner(name, spec, race.load.lengths, folder, threads)
        engine = self.contestant.engine
        kind = self.contestant.decoder_kind
        if name == BASE and issubclass(kind, Decoder):
            race.kind = kind
        race.parts[name] = f"{type(engine.decoder).__name__}, {type(engine.scorers).__name__}"

    def share(self, first: Variant) -> None:
        """Use the first entrant's optimizers, so that their state exists once."""
        self.contestant.engine.actor = first.contestant.engine.actor
        _scorers(self).trainer = _scorers(first).trainer
        gc.collect()  # its own optimizers, and the replaced decoder

    def step(self, driver: GpuStats, device: torch.device) -> Step:
        """One measured PPO step."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        driver.take()
        cost = self.contestant.step()
        told, peak = driver.take(), torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        newest, decoder = self.contestant.journal.newest, self.contestant.engine.decoder
        rows = [(prompt, response) for _, prompt, response in newest["spans"]["trained"]]
        work = Work(rows, decoder.rounds, decoder.decoded)
        return Step(cost.seconds, cost.trained, newest["step"]["metrics"], told, work, peak)


def _scorers(entrant: Variant) -> Any:
    """The `ScorerSet` behind the queue or thread."""
    scorers: Any = entrant.contestant.engine.scorers
    return getattr(scorers, "_scorers", scorers)


@dataclass(frozen=True, slots=True)
class Track:
    """Environment of a race: networks, prompts, scratch folder, device, driver metrics, and the clock with the cell's share."""

    models: ModelSet
    prompts: Path
    folder: Path
    device: torch.device
    threads: int
    driver: GpuStats
    seconds: float
    repetitions: int
    progress: Progress
    profile: bool = False


def run(race: Race, track: Track) -> None:
    """Race a cell's variants in heats that fit into memory, `BASE` in each of them; `race` gets the results."""
    heats = _heats(race, track)
    share = track.seconds / len(heats)
    for number, names in enumerate(heats):
        try:
            race_heat(race, track, names, Clock(share), f"heat-{number}")
        except torch.OutOfMemoryError as error:
            race.left_out.append(f"{race.cell.case}: {', '.join(names)}: {str(error).splitlines()[0]}")
        gc.collect()
        if track.device.type == "cuda":
            torch.cuda.empty_cache()


def cache_bytes(load: Load) -> int:
    """KV cache of one variant's four networks for B+Δ rows."""
    size, width = load.size, 2 if load.size.dtype == "bfloat16" else 4
    token = size.layers * 2 * size.key_heads * (size.hidden // size.heads) * width
    return 4 * (load.batch + load.overcommit) * CONTEXT * token


def training_bytes(load: Load, adapted: bool) -> int:
    """Training state of one actor and one critic besides their weights, and a pass's logits and activations."""
    size = load.size
    number = 20 if size.dtype == "bfloat16" else 16  # gradient, two moments, the optimizer's temporary, each in float32; masters
    trained = 0 if adapted else 2 * size.parameters * number
    return trained + size.micro_batch_tokens * (12 * size.vocab + 40 * size.layers * size.hidden)


def _heats(race: Race, track: Track) -> list[list[str]]:
    names = [name for name in BY_IMPORTANCE if name in race.cell.variants]
    if track.device.type != "cuda":
        return [[BASE, *names]]
    free = ROOM * torch.cuda.mem_get_info(track.device)[0] - training_bytes(race.load, "lora" in track.models.models())
    together = max(1, int(free // cache_bytes(race.load)) - 1)
    return [[BASE, *names[first : first + together]] for first in range(0, len(names), together)] or [[BASE]]


def race_heat(race: Race, track: Track, names: list[str], clock: Clock, label: str) -> None:
    """Assemble, warm up, and run steps in turn until the time is used up."""
    with ExitStack() as stack:
        entrants: list[Variant] = []
        half = clock.left / 2
        for number, name in enumerate(names):
            if number > 1 and clock.left < half:
                race.left_out.append(f"{race.cell.case}: {', '.join(names[number:])}: half of the time was used up by warming up")
                break
            track.progress(f"{race.cell.case}: assembling {name}")
            entrant = Variant(name, race, track.models, track.prompts, track.folder / label / name, track.threads)
            stack.callback(entrant.contestant.close)
            entrants.append(entrant)
            if len(entrants) > 1:
                entrant.share(entrants[0])
            track.progress(f"{race.cell.case}: warming up {entrant.name}")
            # Warm-up: the pool fills, its oldest answers reach their age, and a GPU sees every shape of a round.
            for _ in range(race.load.left_out):
                entrant.step(track.driver, track.device)
        _repeat(race, track, entrants, clock)
        for entrant in entrants if track.profile else ():
            track.progress(f"{race.cell.case}: profiling {entrant.name}")
            race.profiles[entrant.name] = profile_step(partial(entrant.step, track.driver, track.device), track.device)


def _repeat(race: Race, track: Track, entrants: list[Variant], clock: Clock) -> None:
    for number in range(track.repetitions):
        start = clock.left
        if start <= 0 and number:
            race.left_out.append(f"{race.cell.case}: repetitions from {number + 1} on of {', '.join(e.name for e in entrants)}")
            return
        track.progress(f"{race.cell.case}: repetition {number + 1} of {track.repetitions}")
        for entrant in entrants:
            race.first.setdefault(entrant.name, len(race.blocks[BASE]))
        steps = {e.name: [e.step(track.driver, track.device) for _ in range(race.load.max_age)] for e in entrants}
        for name, block in steps.items():
            race.blocks[name].append(block)
        if clock.left < start - clock.left:  # another one would exceed the remaining time
            clock = Clock(0)
