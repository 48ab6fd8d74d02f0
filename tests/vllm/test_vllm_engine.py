"""vLLM itself: whole runs, weights after updates, failures of its process, and arguments that only a GPU uses."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

pytest.importorskip("vllm", reason="make test-vllm installs it")

from oppo_contract.sections.models import Lora
from oppo_contract.spec import RunSpec, load_spec
from oppo_core.models.model_io import load_model
from oppo_core.models.shared_weights import SHARED_MEMORY
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sequence import Sequence
from oppo_core.vllm import build, engine_args, weight_transfer
from oppo_core.vllm.build import build_decoder
from oppo_core.vllm.engine_args import Placement
from oppo_core.vllm.errors import VllmError
from oppo_core.vllm.subprocess_decoder import StreamingDecoder
from tests.engine.conftest import World, world, write_tokenizer  # noqa: F401 - pytest finds the fixture here

VOCAB, EOS, STEPS = 40, 2, 3
ROUNDING = 2e-3  # of vLLM's logits on a CPU, relative: up to 0.007 of 8 were seen
CPU = torch.device("cpu")
SETTINGS = DecodeSettings(seed=3, eos=EOS, temperature=1e-4, max_prompt=12, max_new=24, micro_batch_tokens=400)


def write_qwen(folder: Path, kind: str, **more: Any) -> None:
    """A small Qwen2 with the tests' vocabulary."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, eos_token_id=EOS, pad_token_id=0, initializer_range=0.2, **more,
    )  # fmt: skip
    torch.manual_seed(len(kind))
    getattr(transformers, f"Qwen2For{kind}")(config).save_pretrained(folder)
    write_tokenizer(folder, [f"w{n}" for n in range(VOCAB)])


def spec_for(folder: Path, silence_s: float = 600.0, lora: Lora | None = None) -> RunSpec:
    return load_spec(
        {
            "name": "n", "steps": 1, "data": {"prompts": "p"},
            "models": {"actor": {"path": str(folder)}, "reward": {"rule": "r:score"}, "lora": lora and lora.model_dump()},
            "resources": {"longest_silence_s": silence_s, "kind": "cpu"}, "overlap": {"chunk": {"size": 4}},
            "rollout": {
                "backend": "vllm", "max_prompt_tokens": SETTINGS.max_prompt, "max_new_tokens": SETTINGS.max_new,
            },
        }
    )  # fmt: skip


@dataclasses.dataclass
class Decoding:
    """A decoder over vLLM, its network, and the process of its engine."""

    decoder: StreamingDecoder
    network: Any
    process: psutil.Process


@dataclasses.dataclass(frozen=True)
class Layout:
    """Processes that share the layers, and the LoRA adapters to train instead of all weights."""

    workers: int = 1
    lora: Lora | None = None


@pytest.fixture
def layout() -> Layout:
    return Layout()


@pytest.fixture
def decoding(tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoding]:
    write_qwen(tmp_path / "actor", "CausalLM")
    spec = spec_for(tmp_path / "actor", silence_s=60.0, lora=layout.lora)
    network: Any = load_model(spec.models.actor, "lm", [], torch.float32, 0, layout.lora)
    placed = build.decoder_placement
    monkeypatch.setattr(build, "decoder_placement", lambda *given: dataclasses.replace(placed(*given), workers=layout.workers))
    before = set(psutil.Process().children(recursive=True))
    decoder = build_decoder(spec, tmp_path / "actor", network, SETTINGS, None, 4, CPU)
    started = set(psutil.Process().children(recursive=True)) - before
    started = {process for process in started if "tracker" not in " ".join(process.cmdline())}
    (engine,) = [process for process in started if process.ppid() == os.getpid()]
    yield Decoding(decoder, network, engine)
    decoder.close()
    assert psutil.wait_procs(started, timeout=60)[1] == [], "processes are left"
    assert not [thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]


def sequences(count: int) -> list[Sequence]:
    return [Sequence(i, 0, np.asarray([3 + i, 7, 9 + i])) for i in range(count)]


def to_the_end(decoder: StreamingDecoder, version: int) -> None:
    while decoder.live:
        decoder.advance(7, version)


@torch.no_grad()
def distance_from_greedy(network: Any, sequence: Sequence) -> float:
    """How far its tokens' logits are below the largest, at most, relative to it, in one pass of transformers' (peft's) model."""
    logits = network.model(input_ids=torch.from_numpy(sequence.tokens())[None]).logits[0, len(sequence.prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(sequence.response)[:, None]).squeeze(-1)
    return float(((logits.max(-1).values - chosen) / logits.abs().max(-1).values).max())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        pytest.param(Layout(workers=2), marks=pytest.mark.full),
        pytest.param(Layout(lora=Lora(rank=3, alpha=6.0)), marks=pytest.mark.full),
        pytest.param(Layout(workers=2, lora=Lora(rank=8)), marks=pytest.mark.full),
    ],
    ids=["whole", "tensor parallel", "adapters", "adapters, tensor parallel"],
)
def test_tokens_are_greedy_under_the_weights_of_every_update(decoding: Decoding) -> None:
    """Up to ties within rounding; under the weights before they are not."""
    generator, networks = torch.Generator().manual_seed(0), []
    for version in range(4):
        some = sequences(4)
        decoding.decoder.begin(some, version)
        to_the_end(decoding.decoder, version)
        assert max(distance_from_greedy(decoding.network, s) for s in some) < ROUNDING
        assert {v for s in some for v in s.token_versions} == {version}
        assert all(max(distance_from_greedy(older, s) for s in some) > 10 * ROUNDING for older in networks)
        networks.append(deepcopy(decoding.network))
        with torch.no_grad():
            for weight in decoding.network.parameters():
                if weight.requires_grad:
                    weight += 0.05 * torch.randn(weight.shape, generator=generator)


def test_an_engine_process_that_dies_is_an_error(decoding: Decoding) -> None:
    decoding.decoder.begin(sequences(2), 0)
    decoding.process.kill()
    with pytest.raises(VllmError, match="EngineDeadError"):
        to_the_end(decoding.decoder, 0)


def test_an_engine_process_that_hangs_is_an_error(decoding: Decoding) -> None:
    decoding.decoder._loop.timeout_s = 2.0
    decoding.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(VllmError, match="assumed to hang"):
            decoding.decoder.begin(sequences(2), 0)
    finally:
        decoding.process.send_signal(signal.SIGCONT)


def test_an_engine_process_that_answers_late_goes_on(decoding: Decoding) -> None:
    decoding.decoder.begin(some := sequences(2), 0)
    decoding.process.send_signal(signal.SIGSTOP)
    waking = threading.Timer(2.0, decoding.process.send_signal, [signal.SIGCONT])
    waking.start()
    to_the_end(decoding.decoder, 0)
    waking.join()
    assert all(s.finished for s in some)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], psutil.Process, Path]]:
    """A process that trains, that of its engine, and the folder of the engine's files."""
    write_qwen(tmp_path / "actor", "CausalLM")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.vllm.small_trainer", str(tmp_path / "actor")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            _, engine, files = next(line for line in process.stdout if line.startswith("engine:")).split()
            yield process, psutil.Process(int(engine)), Path(files)
        finally:
            process.kill()


def test_the_engine_ends_with_a_trainer_that_is_killed(trainer: Any) -> None:
    process, engine, files = trainer
    assert files.exists()
    assert list(SHARED_MEMORY.glob(f"oppo-adapter-{process.pid}-*"))
    process.kill()
    assert psutil.wait_procs([engine], timeout=60)[1] == []
    assert not files.exists()
    assert not list(SHARED_MEMORY.glob(f"oppo-*-{process.pid}-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_trainers_group_does_not_end_the_engine(trainer: Any, number: int) -> None:
    """As by Ctrl-C, or systemd: the trainer decides when the engine ends."""
    process, engine, _ = trainer
    os.killpg(process.pid, number)
    process.stdin.write("decode\n")
    process.stdin.flush()
    assert next(line for line in process.stdout if line.startswith("finished:")) == "finished: 2\n"
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    assert not engine.is_running()


def test_threads_and_seeds_of_our_process_are_unchanged(tmp_path: Path) -> None:
    write_qwen(tmp_path / "actor", "CausalLM")
    spec = spec_for(tmp_path / "actor")
    network: Any = load_model(spec.models.actor, "lm", [], torch.float32, 0)
    torch.set_num_threads(2)
    torch.manual_seed(5)
    drawn = torch.random.get_rng_state()
    variables = dict(os.environ)
    decoder = build_decoder(spec, tmp_path / "actor", network, SETTINGS, None, 4, CPU)
    try:
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert torch.get_num_threads() == 1
        assert torch.equal(torch.random.get_rng_state(), drawn)
        assert not torch.distributed.is_initialized()
        changed = {name for name in os.environ if variables.get(name) != os.environ[name]}
        assert changed <= {*engine_args.CPU_ENVIRONMENT, "VLLM_RPC_BASE_PATH"}
    finally:
        decoder.close()


def write_roles(world: World) -> None:  # noqa: F811
    write_qwen(world.folder / "qwen", "CausalLM")
    write_qwen(world.folder / "qwen-reward", "SequenceClassification", num_labels=1)


RUN = {
    "steps": STEPS, "rollout": {"backend": "vllm", "max_new_tokens": 24}, "ppo": {"learning_rate": 1e-2},
    "models": {"actor": {"path": "qwen"}, "critic": "actor", "reward": {"model": {"path": "qwen-reward"}}},
    "resources": {"dtype": "float32", "kind": "cpu"}, "checkpoints": {"every_steps": 1, "keep": 9},
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"overlap": {"inter_step": "off", "intra_step": "off"}},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"overlap": {"kv_after_update": "keep"}}, marks=pytest.mark.full),
        pytest.param({"models": {"reward": {"served_by": "vllm"}}, "rollout": {"max_new_tokens": 84}}, marks=pytest.mark.full),
        pytest.param({"models": {"lora": {"rank": 4}}}, marks=pytest.mark.full),
    ],
    ids=["sequential", "OPPO", "caches kept", "reward served by vLLM", "low-rank adapters"],
)
def test_a_whole_run(world: World, tmp_path: Path, changes: dict[str, Any]) -> None:  # noqa: F811
    """Sampled log-probs are the trainer's up to rounding in every step, so each one decoded with that step's weights."""
    write_roles(world)
    status, events = world.main(world.tree(RUN, changes), tmp_path, threads=2)  # a core for the actor, one for the scorers
    assert (status, events[-1].outcome) == (0, "succeeded"), events[-1]
    running = {process for process in psutil.process_iter(["name", "status"]) if process.info["status"] != psutil.STATUS_ZOMBIE}
    assert not [process for process in running if process.info["name"].startswith("VLLM")], "an engine is left"
    steps = [event.metrics for event in events if event.kind == "step"]
    assert len(steps) == STEPS
    limit = 1e-3
    assert all(metrics["oppo/behaviour_prox_kl/fresh_max"] < limit for metrics in steps)
    if changes == {}:
        assert any(metrics["oppo/deferred_share"] > 0 for metrics in steps)
    if "models" in changes and "reward" in changes["models"]:
        assert any(metrics.get("oppo/reward_cached_share", 0) > 0 for metrics in steps)


@pytest.mark.full
def test_a_stopped_run_resumes(world: World, tmp_path: Path) -> None:  # noqa: F811
    write_roles(world)
    status, _ = world.main(world.tree(RUN), tmp_path / "first")
    assert status == 0
    resume = tmp_path / "first" / "checkpoints" / "step-00000002"
    status, events = world.main(world.tree(RUN), tmp_path / "rest", "--resume-from", resume)
    assert (status, events[-1].outcome, events[-1].step) == (0, "succeeded", STEPS)


def fields(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_arguments_for_gpus_are_declared_by_vllm() -> None:
    from vllm import envs
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams

    placement = Placement((1, 2), 0.5)
    filtered = dataclasses.replace(SETTINGS, filters=Filters(20, 0.9, 0.01))
    AsyncEngineArgs(**engine_args.engine_arguments("x", "bfloat16", filtered, 4, True, placement))
    AsyncEngineArgs(**engine_args.reward_arguments("x", "bfloat16", 52, 4, placement))
    SamplingParams(**engine_args.sampling_arguments(filtered, Sequence(0, 0, np.asarray([1]))))
    for devices, info in ((2, NCCLTrainerInitInfo), (0, IPCTrainerInitInfo)):
        assert weight_transfer.trainer_arguments(devices, 1).keys() <= fields(info)
    variables = {*engine_args.GPU_ENVIRONMENT, *engine_args.CPU_ENVIRONMENT, *engine_args.IPC_ENVIRONMENT, "VLLM_RPC_BASE_PATH"}
    assert variables <= envs.environment_variables.keys()
