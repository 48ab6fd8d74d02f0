"""Every name and argument of vLLM that we use stands in the sources of the wheel that is pinned."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oppo_core.rewards import vllm_model
from oppo_core.rollout.decoder import DecodeSettings
from oppo_core.rollout.sampling import Filters
from oppo_core.rollout.sequence import Sequence
from oppo_core.vllm import engine_args, inprocess, protocols, weight_transfer
from tests.backends.vllm_names import FILE, names_of
from tests.fakes.vllm_async_engine import FakeAsyncEngine, FakeWeightTrainer
from tests.fakes.vllm_engine import FakeEngine
from tests.fakes.vllm_pooling_engine import FakePoolingEngine

ROOT = Path(__file__).parents[2]
KNOWN: dict[str, Any] = json.loads(FILE.read_text())
CLASSES = {name: told for classes in KNOWN["classes"].values() for name, told in classes.items()}
# Ours, and whose names they have.
SHAPES = {
    protocols.Logprobs: "FlatLogprobs",
    protocols.Mask: "SamplingMask",
    protocols.VersionSpan: "WeightVersionSpan",
    protocols.Completion: "CompletionOutput",
    protocols.Output: "RequestOutput",
    protocols.Pooled: "PoolingRequestOutput",
    protocols.Scores: "PoolingOutput",
    weight_transfer.WeightMeta: "ParamMeta",
}
# Ours, vLLM's, and what is held to the same names.
CALLED = [
    (protocols.Engine, "LLMEngine", FakeEngine),
    (protocols.AsyncEngine, "AsyncLLM", FakeAsyncEngine),
    (protocols.PoolingEngine, "AsyncLLM", FakePoolingEngine),
    (protocols.WeightTrainer, "TrainerWeightTransferEngine", FakeWeightTrainer),
    (weight_transfer.WeightSyncClient, "VLLMWeightSyncClient", weight_transfer.WeightSyncClient),
    (weight_transfer.WeightSource, "WeightSource", weight_transfer.WeightSource),
]
SETTINGS = DecodeSettings(3, 1, 0.9, 12, 40, 400, filters=Filters(20, 0.9, 0.01))


def pinned() -> str:
    """The requirement, as `pip` takes it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return str(extras["gpu"][0]).partition(";")[0].strip()


def test_the_names_are_those_of_the_version_that_is_pinned() -> None:
    assert KNOWN["wheel"].split("-")[:2] == pinned().split("==")


@pytest.mark.parametrize("ours", SHAPES)
def test_used_output_fields_exist(ours: type) -> None:
    assert set(inspect.get_annotations(ours)) <= set(CLASSES[SHAPES[ours]]["fields"])


@pytest.mark.parametrize(("ours", "theirs", "fake"), CALLED, ids=[ours.__name__ for ours, _, _ in CALLED])
def test_an_engine_takes_what_we_call_it_with(ours: type, theirs: str, fake: type) -> None:
    declared = CLASSES[theirs]["methods"]
    for name, function in called_on(ours, declared).items():
        wanted = [p for p in inspect.signature(function).parameters if p != "self"]
        assert wanted == declared[name][: len(wanted)], name
        assert list(inspect.signature(getattr(fake, name)).parameters)[1:] == wanted, name


def called_on(ours: type, declared: dict[str, Any]) -> dict[str, Any]:
    return {name: f for name, f in vars(ours).items() if inspect.isfunction(f) and (name in declared or name[0] != "_")}


def test_every_declared_name_is_used() -> None:
    for theirs in {name for _, name, _ in CALLED}:
        declared = CLASSES[theirs]["methods"]
        called = {name for ours, of, _ in CALLED if of == theirs for name in called_on(ours, declared)}
        assert declared.keys() - called <= {"from_engine_args"}


def test_engine_constructors_accept_our_arguments() -> None:
    for engine in ("LLMEngine", "AsyncLLM"):
        assert CLASSES[engine]["methods"]["from_engine_args"][0] == "engine_args"
    assert "weights_iterator" in CLASSES["GPUModelRunner"]["methods"]["reload_weights"]
    assert CLASSES["WeightTransferTrainerFactory"]["methods"]["trainer_init"] == ["init_info", "client", "source"]
    assert "backend" in CLASSES["WeightTransferConfig"]["fields"]
    assert CLASSES["WeightTransferInitRequest"]["fields"] == ["init_info"]
    assert CLASSES["WeightTransferUpdateRequest"]["fields"] == ["update_info"]
    assert vllm_model.POOLING.keys() <= set(CLASSES["PoolingParams"]["fields"])
    read = engine_args.reward_arguments("x", "bfloat16", 52, 4, 0.2, 0)
    assert read.keys() <= set(CLASSES["EngineArgs"]["fields"])
    for devices, info in ((2, "NCCLTrainerInitInfo"), (0, "IPCTrainerInitInfo")):
        known = {*CLASSES[info]["fields"], *CLASSES["TrainerInitInfo"]["fields"]}
        assert weight_transfer.trainer_arguments(devices, 1).keys() <= known


def test_the_arguments_are_fields_and_the_environment_is_read() -> None:
    made = engine_args.engine_arguments("x", "bfloat16", SETTINGS, 4, 0.5, True, [1, 2])
    assert made.keys() <= set(CLASSES["EngineArgs"]["fields"])
    apart = engine_args.process_arguments(made)
    assert {*apart, "weight_transfer_config"} <= {*CLASSES["EngineArgs"]["fields"], *CLASSES["AsyncEngineArgs"]["fields"]}
    assert (apart["tensor_parallel_size"], "async_scheduling" in apart) == (2, False)
    sequence = Sequence(0, 0, np.asarray([1]))
    given = engine_args.sampling_arguments(SETTINGS, sequence)
    assert {*given, "output_kind", "stream_interval"} <= set(CLASSES["SamplingParams"]["fields"])
    assert {"top_k", "top_p", "min_p"} <= given.keys()
    assert engine_args.tokens_prompt(sequence).keys() <= set(CLASSES["TokensPrompt"]["fields"])
    assert "DELTA" in CLASSES["RequestOutputKind"]["fields"]
    assert {*engine_args.IN_PROCESS_ENVIRONMENT, *engine_args.SUBPROCESS_ENVIRONMENT, *engine_args.IPC_ENVIRONMENT} == set(
        KNOWN["environment"]
    )


def test_every_import_of_vllm_is_one_that_was_looked_at() -> None:
    imported = set()
    for file in (ROOT / "oppo_core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                imported |= {(f"{(node.module or '').replace('.', '/')}.py", name.name) for name in node.names}
            assert not (isinstance(node, ast.Import) and any(n.name.split(".")[0] == "vllm" for n in node.names)), file
    assert imported == {(file, name) for file, classes in KNOWN["classes"].items() for name in classes} & imported
    assert {name for _, name in imported} == {
        "EngineArgs", "LLMEngine", "SamplingParams", "RequestOutputKind", "AsyncEngineArgs", "AsyncLLM", "WeightTransferConfig",
        "WeightTransferInitRequest", "WeightTransferUpdateRequest", "WeightTransferTrainerFactory", "IPCTrainerInitInfo",
        "NCCLTrainerInitInfo", "PoolingParams",
    }  # fmt: skip
    assert "vllm" not in {module.split(".")[0] for module in sys.modules}, inprocess


@pytest.mark.full
def test_the_wheel_says_so_itself(tmp_path: Path) -> None:
    """Downloads 330 MB, or takes the wheel that OPPO_VLLM_WHEEL names."""
    wheel = os.environ.get("OPPO_VLLM_WHEEL")
    if wheel is None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), pinned()]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the wheel of {pinned()} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
        wheel = str(next(tmp_path.glob("*.whl")))
    found = names_of(Path(wheel))
    assert (found["classes"], found["environment"]) == (KNOWN["classes"], KNOWN["environment"])
