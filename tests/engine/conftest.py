"""A small world to train in: model folders, prompts as token ids, and engines in this process or in one of their own.

Everything is real: the engine's own parts, only small. An untrained actor ends an answer with probability about 1/vocab a
token, so that answers have a long natural tail, and a random reward model gives it something to learn.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from oppo_contract.events import Event, parse_event
from oppo_contract.machine import raise_open_file_limit
from oppo_contract.spec import ModelSpec, RunSpec, TinyArchitecture, load_spec
from oppo_core.checkpointing.save_restore import restore, verify
from oppo_core.cli import main as engine_main
from oppo_core.engine import build as engine_module
from oppo_core.engine import step_report
from oppo_core.engine.build import assemble
from oppo_core.engine.layout import Layout
from oppo_core.engine.state import Engine
from oppo_core.models.adapters import ADAPTER_WEIGHTS
from oppo_core.models.load_roles import DTYPES
from oppo_core.models.model_io import load_model, save_tiny
from oppo_core.models.tensor_files import load_tensors
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny
from oppo_core.ppo.experience import Experience
from oppo_core.reporting.event_log import Journal
from oppo_core.scoring import process
from oppo_core.train import train

VOCAB = 40
ARCHITECTURE = TinyArchitecture(hidden=16, layers=2, heads=2, context=96, vocab=VOCAB)
PATIENCE_S = 120.0
raise_open_file_limit()  # as an engine does: tests assemble many in this process
Tree = dict[str, Any]


def merged(base: Tree, *changes: Tree) -> Tree:
    """`base` with nested `changes` laid over it."""
    result = copy.deepcopy(base)
    for change in changes:
        for key, value in change.items():
            known = result.get(key)
            result[key] = merged(known, value) if isinstance(value, dict) and isinstance(known, dict) else copy.deepcopy(value)
    return result


@dataclass(slots=True)
class Step:
    """What one step trained, as the loop handed it to its report."""

    experience: Experience
    metrics: dict[str, float]
    kl_coefficient: float

    @property
    def tokens(self) -> dict[int, list[int]]:
        """Response tokens by sequence_id."""
        return {s.sequence_id: list(s.response) for s in self.experience.sequences}


@dataclass(slots=True)
class Run:
    """A run that ended in this process."""

    engine: Engine
    out: Path
    reason: str
    steps: list[Step]
    events: list[Event]

    def weights(self, role: str, step: int | None = None) -> dict[str, Tensor]:
        """Weights of `actor` or `critic` in the checkpoint of `step` (default: the newest)."""
        return checkpoint_weights(self.out, role, step)


def checkpoint_weights(out: Path, role: str, step: int | None = None) -> dict[str, Tensor]:
    """Weights of `actor` or `critic` in a checkpoint below `out`; of an actor with adapters those."""
    folder = sorted((out / "checkpoints").glob("step-*"))[-1] if step is None else out / "checkpoints" / f"step-{step:08d}"
    adapters, whole = folder / "actor" / ADAPTER_WEIGHTS, folder / "actor" / "model.safetensors"
    return load_tensors(folder / "critic.safetensors" if role == "critic" else adapters if adapters.exists() else whole, {})


@dataclass(slots=True)
class EngineProcess:
    """`python -m oppo_core` as a child of this test; its events are read as they come."""

    process: subprocess.Popen[str]
    out: Path
    lifeline: int
    events: list[Event] = field(default_factory=list)
    _read: int = 0

    def look(self) -> list[Event]:
        """All complete events so far."""
        path = self.out / "events.jsonl"
        whole = path.read_bytes()[self._read :] if path.exists() else b""
        whole = whole[: whole.rfind(b"\n") + 1]
        self._read += len(whole)
        self.events += [parse_event(line) for line in whole.splitlines()]
        return self.events

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """The first event that is `wanted`; fails when the process ends, or patience does, before it comes."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            ended = self.process.poll() is not None
            for event in self.look():
                if wanted(event):
                    return event
            if ended or time.monotonic() > deadline:
                _, errors = self.process.communicate(timeout=PATIENCE_S) if ended else ("", "it is still running")
                pytest.fail(f"the event never came; status {self.process.poll()}; {errors}")
            select.select([], [], [], 0.002)

    def step(self, number: int) -> Event:
        """Wait until step `number` is told."""
        return self.wait_for(lambda event: event.kind == "step" and event.step >= number)

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit status and stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        self.look()
        return self.process.returncode, errors

    def cut_lifeline(self) -> None:
        """Close the pipe, as the death of whoever started it would."""
        os.close(self.lifeline)
        self.lifeline = -1


# The layout of a streamed run, for an engine whose scorers are built in its own process.
INLINE = Layout(["cpu:0", "cpu:1"], ("cpu:0",), ("cpu:1",), 1, streams=True)


@contextmanager
def streaming_inline() -> Iterator[None]:
    """Within it, engines stream to scorers in their own process: the same calls in the same order, without the pipe."""
    with (
        mock.patch.object(engine_module, "build_layout", return_value=INLINE),
        mock.patch.object(engine_module, "ProcessScorers", lambda build, devices, threads, trace, silence: build(trace)),
    ):
        yield


class recorded:
    """Within it, every step's `Experience` and metrics are collected as the loop reports them."""

    def __enter__(self) -> list[Step]:
        steps: list[Step] = []
        plain = step_report.finish_step

        def finish_step(engine: Engine, batch: Any, experience: Experience, metrics: dict[str, float], *rest: Any) -> Any:
            steps.append(Step(experience, dict(metrics), engine.progress.kl_coefficient))
            return plain(engine, batch, experience, metrics, *rest)

        self._patch = mock.patch.object(step_report, "finish_step", finish_step)
        self._patch.start()
        return steps

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


@dataclass(slots=True)
class World:
    """Folders `actor`, `reward`, … and prompts below `folder`, and the processes started in it."""

    folder: Path
    started: list[EngineProcess] = field(default_factory=list)

    def tree(self, *changes: Tree) -> Tree:
        """A small spec as plain data, with `changes` laid over it."""
        base = {
            "name": "tiny", "seed": 3, "steps": 4, "data": {"prompts": "prompts.jsonl"},
            "models": {"actor": {"path": "actor"}, "reward": {"model": {"path": "reward"}}, "critic": "reward"},
            "ppo": {"batch_size": 6, "learning_rate": 3e-3, "critic_learning_rate": 3e-3, "micro_batch_tokens": 400},
            "rollout": {"max_new_tokens": 84, "max_prompt_tokens": 12},
            "overlap": {"overcommit": {"initial": 3, "min": 1, "max": 4, "window": 3}, "max_age": 2, "chunk": {"size": 8}},
            "resources": {"dtype": "float64"}, "logging": {"samples_per_step": 1}, "checkpoints": {"every_steps": 1000},
        }  # fmt: skip
        return merged(base, *changes)

    def spec(self, *changes: Tree) -> RunSpec:
        """`tree`, checked."""
        return load_spec(self.tree(*changes))

    def assemble(self, spec: RunSpec, out: Path, threads: int = 1, resume: Path | None = None) -> Engine:
        """An engine in this process."""
        changes = verify(resume, spec) if resume is not None else []
        engine = assemble(spec, [self.folder], out, Journal(out / "events.jsonl"), threads, resume)
        if resume is not None:
            restore(engine, resume, changes)
        return engine

    def run(
        self,
        spec: RunSpec,
        out: Path,
        threads: int = 1,
        resume: Path | None = None,
        inline: bool = False,
        stop_after: int = 10**9,
        should_stop: Callable[[], bool] | None = None,
    ) -> Run:
        """Train in this process, asked to stop after `stop_after` steps; `inline` streams to scorers in this process too."""
        with streaming_inline() if inline else nullcontext():
            engine = self.assemble(spec, out, threads, resume)
        try:
            with recorded() as steps:
                reason = train(engine, should_stop or (lambda: engine.progress.step >= stop_after))
        finally:
            engine.scorers.close()
            engine.journal.close()
            torch.set_num_threads(1)
        events = [parse_event(line) for line in (out / "events.jsonl").read_bytes().splitlines()]
        return Run(engine, out, reason, steps, events)

    def main(self, tree: Tree, out: Path, *more: str | Path, threads: int = 1) -> tuple[int, list[Event]]:
        """The engine's whole command line in this process: exit status and events."""
        command = self.command(tree, out, threads) + [str(part) for part in more]
        kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            status = engine_main(command)
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
        return status, [parse_event(line) for line in (out / "events.jsonl").read_bytes().splitlines()]

    def command(self, tree: Tree, out: Path, threads: int) -> list[str]:
        """Write the spec and return the arguments."""
        out.mkdir(parents=True, exist_ok=True)
        (out / "spec.json").write_text(json.dumps(tree))
        parts = ["--spec", out / "spec.json", "--out", out, "--events", out / "events.jsonl", "--root", self.folder]
        return [str(part) for part in (*parts, "--threads", threads)]

    def start(self, tree: Tree, out: Path, threads: int = 1, resume: Path | None = None) -> EngineProcess:
        """Start `python -m oppo_core` on `tree`; it dies with the test at the latest."""
        command = [sys.executable, "-m", "oppo_core", *self.command(tree, out, threads)]
        command += ["--resume-from", str(resume)] if resume is not None else []
        theirs, ours = os.pipe()
        process = subprocess.Popen(
            command, pass_fds=(theirs,), stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPPO_LIFELINE_FD": str(theirs)},
        )  # fmt: skip
        os.close(theirs)
        started = EngineProcess(process, out, ours)
        self.started.append(started)
        return started

    def weights(self, out: Path, role: str) -> dict[str, Tensor]:
        """Weights of `actor` or `critic` in the newest checkpoint below `out`."""
        return checkpoint_weights(out, role)

    def recorded(self) -> recorded:
        """See the class."""
        return recorded()

    def streaming_inline(self) -> Any:
        """See the function."""
        return streaming_inline()

    def inline_streaming(self) -> Layout:
        """See `INLINE`."""
        return INLINE

    def first_weights(self, spec: RunSpec, role: str) -> dict[str, Tensor]:
        """Weights before step 1."""
        source = spec.models.actor if role == "actor" else ModelSpec(path="reward")
        head, shift = ("lm", 0) if role == "actor" else ("scalar", 2)
        return load_model(source, head, [self.folder], DTYPES[spec.resources.dtype], spec.seed + shift).state_dict()


def write_tokenizer(folder: Path, words: list[str]) -> None:
    """A word-level tokenizer.json."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(folder: Path, model: TinyTransformer, words: list[str]) -> None:
    """A model folder with that vocabulary."""
    save_tiny(model, folder, None, eos_token_id=2, pad_token_id=0)
    write_tokenizer(folder, words)


def lively(model: TinyTransformer, seed: int) -> TinyTransformer:
    """`model` with weights so large that every earlier token matters to what it says of the next."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 0.4 if "blocks" in name or "head" in name else 0.25, generator=generator)
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Every test starts with one thread, whatever ran before."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _scorers_of_this_process_are_forked() -> Iterator[None]:
    """From a process that has read torch and has no threads: spawned ones would read it for seconds, dozens of times.

    They see the environment of the first of them. Where that matters, or how such a process ends, tests ask for
    `spawned_scorers`; engines in a process of their own always spawn theirs.
    """
    multiprocessing.set_forkserver_preload(["torch._dynamo", "oppo_core.engine.build"])
    with mock.patch.object(process, "START_METHOD", "forkserver"):
        yield


@pytest.fixture
def spawned_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scorers start as they do outside tests."""
    monkeypatch.setattr(process, "START_METHOD", "spawn")


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The folders, written once; no test changes them."""
    folder = tmp_path_factory.mktemp("world")
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(VOCAB - 3))]
    write_model(folder / "actor", lively(init_tiny(ARCHITECTURE, "lm", 1), 1), words)
    write_model(folder / "reward", lively(init_tiny(ARCHITECTURE, "scalar", 2), 2), words)
    write_model(folder / "other-tokens", lively(init_tiny(ARCHITECTURE, "scalar", 2), 2), words[::-1])
    broken = init_tiny(ARCHITECTURE, "scalar", 2)
    with torch.no_grad():
        broken.head.weight.fill_(float("nan"))
    write_model(folder / "nan-reward", broken, words)
    generator = torch.Generator().manual_seed(5)
    with (folder / "prompts.jsonl").open("w") as prompts:
        for number in range(10):
            ids = torch.randint(3, VOCAB, (1 + number * 11 // 9,), generator=generator).tolist()
            prompts.write(json.dumps({"prompt": ids}) + "\n")
    with (folder / "texts.jsonl").open("w") as texts:
        for number in range(7):
            ids = torch.randint(3, VOCAB, (1 if number == 3 else 4 + 3 * number,), generator=generator).tolist()
            texts.write(json.dumps({"text": ids}) + "\n")
    with (folder / "echo.jsonl").open("w") as prompts:  # other prompts than those that are trained
        for number in range(5):
            ids = torch.randint(3, VOCAB, (3,), generator=generator).tolist()
            prompts.write(json.dumps({"prompt": (ids * 4)[: 8 + number]}) + "\n")
    world = World(folder)
    yield world
    for started in world.started:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()
        if started.lifeline >= 0:
            os.close(started.lifeline)


OBSERVED: Tree = {
    "steps": 12, "ppo": {"batch_size": 8}, "checkpoints": {"every_steps": 5}, "resources": {"dtype": "float32"},
    "overlap": {"overcommit": {"max": 6, "initial": 4}},
}  # fmt: skip


@pytest.fixture(scope="session")
def sequential_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A sequential run on two cores; look only."""
    changes: Tree = {"overlap": {"intra_step": "off", "inter_step": "off"}}
    return world.run(world.spec(OBSERVED, changes), tmp_path_factory.mktemp("sequential"), threads=2)


@pytest.fixture(scope="session")
def oppo_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with both overlaps, one core for the actor and one for the scorers' process; look only."""
    changes: Tree = {"overlap": {"intra_step": "per_chunk", "inter_step": "defer"}}
    return world.run(world.spec(OBSERVED, changes), tmp_path_factory.mktemp("oppo"), threads=2)


def newest(out: Path) -> Path:
    """The last checkpoint of a run."""
    return sorted((out / "checkpoints").glob("step-*"))[-1]
