"""How vLLM is started and connected, with fakes of its modules: GPUs, failures, environment variables."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from oppo_contract.spec import RunSpec, TinyArchitecture, load_spec
from oppo_core.models.tiny_transformer import TinyTransformer, init_tiny
from oppo_core.rewards.protocol import Answer
from oppo_core.rewards.vllm_model import build_vllm_reward
from oppo_core.rollout.decoder import DecoderProtocol, DecodeSettings
from oppo_core.rollout.sequence import Sequence
from oppo_core.rollout.tokenizer import ByteCodec
from oppo_core.vllm.build import build_decoder, decoding_gpus
from oppo_core.vllm.engine_args import (
    AGENT_STORE,
    GPU_ENVIRONMENT,
    IPC_ENVIRONMENT,
    Placement,
    reward_arguments,
    sampling_supports,
)
from oppo_core.vllm.errors import VllmError
from tests.fakes.vllm_async_engine import FakeAsyncEngine, FakeWeightTrainer, Wire
from tests.fakes.vllm_pooling_engine import FakePoolingEngine

VOCAB = 40
SETTINGS = DecodeSettings(seed=3, eos=1, temperature=0.9, max_prompt=12, max_new=30, micro_batch_tokens=400)


@dataclass
class Started:
    """What was asked of vLLM."""

    arguments: dict[str, Any] = field(default_factory=dict)
    backend: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    engines: list[Any] = field(default_factory=list)
    fault: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    sets: dict[str, str] = field(default_factory=dict)  # variables that vLLM sets


def small_network(head: Any = "lm") -> TinyTransformer:
    return init_tiny(TinyArchitecture(vocab=VOCAB, context=256, hidden=16, layers=2, heads=2), head, 0).double()


def modules(told: Started) -> dict[str, ModuleType]:
    """vLLM's, as far as we import it."""
    wire = Wire()

    def make(arguments: dict[str, Any], kind: Any) -> Any:
        told.arguments, told.environment = dict(arguments), dict(os.environ)
        os.environ.update(told.sets)
        if told.fault == "start":
            raise RuntimeError("no memory")
        if arguments.get("runner") == "pooling":
            kind = lambda network, wire: FakePoolingEngine(small_network("scalar"))  # noqa: E731
        told.engines.append(kind(small_network(), wire))
        return told.engines[-1]

    contents: dict[str, dict[str, Any]] = {
        "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=lambda given: make(given, FakeAsyncEngine))},
        "vllm.sampling_params": {
            "SamplingParams": dict, "RequestOutputKind": SimpleNamespace(DELTA="delta"),
        },
        "vllm.pooling_params": {"PoolingParams": dict},
    }  # fmt: skip
    return packages_of(contents | transfer_modules(told, wire))


def transfer_modules(told: Started, wire: Wire) -> dict[str, dict[str, Any]]:
    """What hands weights over."""

    def trainer_init(info: dict[str, Any], *, client: Any, source: Any) -> FakeWeightTrainer:
        told.info = dict(info)
        if told.fault == "meet":
            raise RuntimeError("nobody came")
        return FakeWeightTrainer(client, source, wire if "world_size" in info else None)

    def config(backend: str) -> SimpleNamespace:
        told.backend = backend
        return SimpleNamespace(backend=backend)

    transfer = "vllm.distributed.weight_transfer"
    return {
        "vllm.config.weight_transfer": {"WeightTransferConfig": config},
        f"{transfer}.base": {
            "WeightTransferInitRequest": SimpleNamespace, "WeightTransferUpdateRequest": SimpleNamespace,
        },
        f"{transfer}.factory": {"WeightTransferTrainerFactory": SimpleNamespace(trainer_init=trainer_init)},
        f"{transfer}.ipc_engine": {"IPCTrainerInitInfo": dict},
        f"{transfer}.nccl_engine": {"NCCLTrainerInitInfo": dict},
    }  # fmt: skip


def packages_of(contents: dict[str, dict[str, Any]]) -> dict[str, ModuleType]:
    """Modules with these names in them, by path, and the packages above them."""
    made: dict[str, ModuleType] = {}
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        module = made.setdefault(path, ModuleType(path))
        vars(module).update(names)
    return made


@pytest.fixture
def told() -> Iterator[Started]:
    started = Started()
    with mock.patch.dict(sys.modules, modules(started)), mock.patch.dict(os.environ):
        yield started
    assert not [thread for thread in threading.enumerate() if thread.name == "oppo-vllm"]


GPU = torch.device("cuda", 0)


def spec_of(devices: int = 1, decoding: int = 0, scoring: int = 0, **rollout: Any) -> RunSpec:
    resources = {"devices": devices, "decoding_devices": decoding, "scoring_devices": scoring, "longest_silence_s": 20}
    return load_spec(
        {
            "name": "n", "steps": 1, "data": {"prompts": "p"}, "models": {"actor": {"path": "a"}, "reward": {"rule": "r:score"}},
            "ppo": {"tis": "all"}, "resources": resources,
            "rollout": {"backend": "vllm", "vllm_memory_share": 0.25} | rollout,
            "overlap": {"chunk": {"size": 4}},
        }
    )  # fmt: skip


def decoded(decoder: DecoderProtocol) -> list[list[int]]:
    some = [Sequence(i, 0, np.asarray([3 + i] * (2 + i))) for i in range(3)]
    try:
        decoder.begin(some, 7)
        while decoder.live:
            decoder.advance(5, 7)
        assert all(s.token_versions == [7] * s.length for s in some)
    finally:
        decoder.close()
    return [s.response for s in some]


def test_each_rank_has_an_equal_part_of_the_gpus_that_only_decode() -> None:
    spec = spec_of(devices=6, decoding=4)
    assert [decoding_gpus(spec, device) for device in (0, 1)] == [[2, 3], [4, 5]]
    assert decoding_gpus(spec_of(), 0) == []
    behind_those_that_score = spec_of(devices=6, decoding=2, scoring=2)
    assert [decoding_gpus(behind_those_that_score, device) for device in (0, 1)] == [[4], [5]]


def test_own_and_shared_gpus_give_the_same_tokens(told: Started) -> None:
    written = []
    os.environ[AGENT_STORE] = "True"  # as below torchrun
    for devices, decoding in ((1, 0), (3, 2)):
        spec = spec_of(devices, decoding)
        written.append(decoded(build_decoder(spec, Path("folder"), small_network(), SETTINGS, None, 8, GPU)))
        assert (told.arguments["model"], told.arguments["gpu_memory_utilization"]) == ("folder", 0.25)
        assert AGENT_STORE not in told.environment
        assert os.environ[AGENT_STORE] == "True", "our own process groups need it"
    assert written[0] == written[1]


def test_variables_that_vllm_sets_do_not_stay(told: Started) -> None:
    told.sets = {"LD_PRELOAD": "libtcmalloc.so", "LOCAL_WORLD_SIZE": "1"}
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    decoded(build_decoder(spec_of(), Path("folder"), small_network(), SETTINGS, None, 8, GPU))
    assert "LD_PRELOAD" not in os.environ
    assert os.environ["LOCAL_WORLD_SIZE"] == "4"


def test_on_our_gpu_weights_come_by_handles(told: Started) -> None:
    third = torch.device("cuda", 3)
    decoded(build_decoder(spec_of(vllm_sleep=True), Path("folder"), small_network(), SETTINGS, None, 8, third))
    assert (told.backend, told.arguments["device_ids"], told.arguments["tensor_parallel_size"]) == ("ipc", [3], 1)
    assert told.arguments["enable_sleep_mode"] is True
    assert "world_size" not in told.info
    assert (GPU_ENVIRONMENT | IPC_ENVIRONMENT).items() <= told.environment.items()


def test_on_gpus_of_its_own_weights_come_by_nccl_and_nothing_is_unpickled(told: Started) -> None:
    decoded(build_decoder(spec_of(devices=3, decoding=2), Path("folder"), small_network(), SETTINGS, None, 8, GPU))
    assert (told.backend, told.arguments["device_ids"], told.arguments["tensor_parallel_size"]) == ("nccl", [1, 2], 2)
    assert (told.info["world_size"], told.info["rank"], told.info["packed"]) == (3, 0, True)
    assert GPU_ENVIRONMENT.items() <= told.environment.items()
    assert not IPC_ENVIRONMENT.keys() & told.environment.keys()
    assert told.engines[0].dead


MET = "the weight transfer failed: RuntimeError: nobody came"


@pytest.mark.parametrize(("fault", "words"), [("start", "failed at starting: RuntimeError: no memory"), ("meet", MET)])
def test_failed_engine_start_releases_all_resources(told: Started, fault: str, words: str) -> None:
    told.fault = fault
    with pytest.raises(VllmError, match=words):
        build_decoder(spec_of(), Path("folder"), small_network(), SETTINGS, None, 8, GPU)
    assert all(engine.dead for engine in told.engines)


def test_a_reward_model_reads_by_itself(told: Started, tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    os.environ.update(IPC_ENVIRONMENT)  # as beside a decoder that reads some
    placement = Placement((1,), 0.2)
    arguments = reward_arguments(str(tmp_path), "float32", 64, 4, placement)
    reward = build_vllm_reward(tmp_path, arguments, 20.0, placement)
    assert told.environment.keys() & (GPU_ENVIRONMENT | IPC_ENVIRONMENT).keys() == GPU_ENVIRONMENT.keys()
    assert IPC_ENVIRONMENT.items() <= os.environ.items()
    try:
        reward.start([Answer(1, [3, 4], [5, 6, 1], ByteCodec(VOCAB))], lambda: None)
        assert reward.wait([1], 20.0)
    finally:
        reward.close()
    assert (told.arguments["runner"], told.arguments["device_ids"], told.arguments["block_size"]) == ("pooling", [1], 16)
    told.fault = "start"
    with pytest.raises(VllmError, match="starting the reward model: RuntimeError: no memory"):
        build_vllm_reward(tmp_path, arguments, 20.0, placement)


def test_a_filtered_token_without_its_mask_is_an_error() -> None:
    """Its log-prob is renormalised over the mask, which the trainer would not know."""
    unmasked = SimpleNamespace(token_ids=[3], sampling_mask=None)
    with pytest.raises(VllmError, match="vLLM reports no sampling mask"):
        sampling_supports(unmasked, filtered=True)
    assert sampling_supports(unmasked, filtered=False) == []
    assert sampling_supports(SimpleNamespace(token_ids=[], sampling_mask=None), filtered=True) == []
