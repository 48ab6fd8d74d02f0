"""Names and parameters of vLLM that oppo_core/vllm uses, read from the pinned wheel's sources without importing them.

python -m tests.backends.vllm_names vllm-0.32.0-….whl      writes tests/fixtures/vllm_names.json
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

FILE = Path(__file__).parents[1] / "fixtures" / "vllm_names.json"
# Files and their classes. Of a class the fields and the methods' parameters are kept, of a module the environment's names.
CLASSES = {
    "vllm/engine/arg_utils.py": ["EngineArgs", "AsyncEngineArgs"],
    "vllm/sampling_params.py": ["SamplingParams", "RequestOutputKind"],
    "vllm/pooling_params.py": ["PoolingParams"],
    "vllm/outputs.py": [
        "RequestOutput", "CompletionOutput", "SamplingMask", "WeightVersionSpan", "PoolingRequestOutput", "PoolingOutput",
    ],
    "vllm/logprobs.py": ["FlatLogprobs"],
    "vllm/v1/engine/llm_engine.py": ["LLMEngine"],
    "vllm/v1/engine/async_llm.py": ["AsyncLLM"],
    "vllm/config/weight_transfer.py": ["WeightTransferConfig"],
    "vllm/distributed/weight_transfer/base.py": [
        "ParamMeta", "WeightSource", "VLLMWeightSyncClient", "WeightTransferInitRequest", "WeightTransferUpdateRequest",
        "TrainerInitInfo", "TrainerWeightTransferEngine",
    ],
    "vllm/distributed/weight_transfer/factory.py": ["WeightTransferTrainerFactory"],
    "vllm/distributed/weight_transfer/ipc_engine.py": ["IPCTrainerInitInfo"],
    "vllm/distributed/weight_transfer/nccl_engine.py": ["NCCLTrainerInitInfo"],
    "vllm/v1/worker/gpu/model_runner.py": ["GPUModelRunner"],
    "vllm/inputs/llm.py": ["TokensPrompt"],
    "vllm/envs.py": [],
}  # fmt: skip
ENVIRONMENT = (
    "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS",
    "VLLM_USE_V2_MODEL_RUNNER", "VLLM_WORKER_MULTIPROC_METHOD",
)  # fmt: skip
# Classes have methods by the hundred; of these few the names and parameters are kept.
METHODS = {
    "LLMEngine": [
        "from_engine_args", "add_request", "step", "abort_request", "reset_prefix_cache", "collective_rpc",
        "set_weight_version", "has_unfinished_requests", "sleep", "wake_up",
    ],
    "GPUModelRunner": ["reload_weights"],
    "AsyncLLM": [
        "from_engine_args", "generate", "encode", "abort", "pause_generation", "resume_generation", "sleep", "wake_up",
        "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "shutdown",
    ],
    "WeightSource": ["metadata", "__iter__"],
    "VLLMWeightSyncClient": [
        "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
    ],
    "TrainerWeightTransferEngine": ["send_weights", "shutdown"],
    "WeightTransferTrainerFactory": ["trainer_init"],
}  # fmt: skip


def names_of(wheel: Path) -> dict[str, Any]:
    """`{"wheel", "sha256", "classes": {file: {class: {"fields", "methods"}}}, "environment"}` of a wheel.

    Raises:
        KeyError: the wheel lacks a file, or a file a class.
    """
    with ZipFile(wheel) as archive:
        trees = {name: ast.parse(archive.read(name)) for name in CLASSES}
    return {
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "classes": {name: {c: _declared(trees[name], c) for c in classes} for name, classes in CLASSES.items() if classes},
        "environment": _environment(trees["vllm/envs.py"]),
    }


def _declared(tree: ast.Module, name: str) -> dict[str, Any]:
    declared = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}[name]
    methods = {n.name: n for n in declared.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    fields = [n.target.id for n in declared.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    fields += [t.id for n in declared.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)]
    if "__init__" in methods and not fields:  # a plain class: what it is made with
        fields = _parameters(methods["__init__"])
    return {"fields": sorted(fields), "methods": {m: _parameters(methods[m]) for m in METHODS.get(name, [])}}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [a.arg for a in every if a.arg not in ("self", "cls")]


def _environment(tree: ast.Module) -> list[str]:
    named = (n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
    return sorted({name for name in named if name in ENVIRONMENT})


if __name__ == "__main__":
    FILE.write_text(json.dumps(names_of(Path(sys.argv[1])), indent=1) + "\n")
