"""How far is the estimate from a GPU's memory? `python bench/gpu_memory.py [--cases A,B] [--json FILE]`

Each case is a run of three steps by the engine's own command, on models with random weights in the shapes of Qwen2.5, which
hardly ever sample the end token, so that every answer has the longest length, as the estimate assumes. Prints what `oppo spec
check --deep` estimates beside torch's peaks of allocated and reserved memory, and the process's memory as the driver counts
it. Exit status 1 if the allocated peak exceeds the estimate without its reserve for libraries, or that is more than a quarter
above it. Without a GPU it only tries the command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from oppo_bench.document import Result, document, write
from oppo_bench.engine.models import write_tokenizer
from oppo_bench.engine.workload import Size, write_prompts
from oppo_bench.gpu.cases import SHAPES
from oppo_bench.gpu.random_models import described
from oppo_bench.machine_load import LoadMonitor
from oppo_contract.events import parse_event
from oppo_contract.spec import load_spec
from oppo_core.engine.preflight import preflight
from oppo_estimate.memory import GPU_RESERVE

GB = 1e9
STEPS, BATCH, PROMPT, RESPONSE = 3, 32, 16, 256
MEASURED = {"allocated": "perf/max_memory_allocated_gb", "reserved": "perf/max_memory_reserved_gb", "driver": "memory_gb"}
MOST_ABOVE = 1.25
SEQUENTIAL = {"overlap": {"intra_step": "off", "inter_step": "off"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5B": ("0.5B", {}),
    "0.5B sequential": ("0.5B", SEQUENTIAL),
    "0.5B recompute": ("0.5B", {"training": {"recompute": "full"}}),
    "0.5B LoRA": ("0.5B", {"lora": {"rank": 16}}),
    "0.5B FSDP2": ("0.5B", {"training": {"backend": "fsdp2"}}),
    "1.5B": ("1.5B", {}),
    "tiny": ("tiny", {}),
}


def spec(size: Size, changes: dict[str, Any], models: Path, prompts: Path) -> dict[str, Any]:
    """The run of a case, with the folders that `write_models` wrote."""
    actor, reward = ({"path": str(models / name)} for name in ("actor", "reward"))
    roles: dict[str, Any] = {"actor": actor, "critic": "reward", "reward": {"model": reward}}
    if "lora" in changes:
        roles["lora"] = changes["lora"]
    return {
        "name": "memory", "steps": STEPS, "models": roles, "data": {"prompts": str(prompts)},
        "ppo": {"batch_size": BATCH, "micro_batch_tokens": size.micro_batch_tokens, "learning_rate": 1e-6},
        "rollout": {"max_new_tokens": RESPONSE, "max_prompt_tokens": PROMPT},
        "overlap": changes.get("overlap", {}), "training": changes.get("training", {}),
        "resources": {"kind": "cuda" if torch.cuda.is_available() else "cpu", "dtype": size.dtype},
        "checkpoints": {"every_steps": 1000},
    }  # fmt: skip


def write_models(size: Size, folder: Path) -> None:
    """A language model and a reward model with random weights, and their tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model("qwen2", **described(size, untied=False))
    kinds = {"actor": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification}
    for name, kind in kinds.items():
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            kind.from_config(config, dtype=getattr(torch, size.dtype)).save_pretrained(folder / name)
        write_tokenizer(folder / name)
    torch.cuda.empty_cache()


def measure(name: str, models: Path, prompts: Path, folder: Path) -> tuple[dict[str, float], float]:
    """Peaks of a run's process in GB, by source, with its step time; and the estimate in GB.

    Raises RuntimeError when the run fails.
    """
    size, changes = CASES[name]
    text = spec(SHAPES[size], changes, models, prompts)
    (device, *_) = preflight(load_spec(text), []).memory
    others = used_bytes() / GB
    steps = train(text, folder, STEPS - 1)
    peaks = {key: max(_metric(step, metric) for step in steps) for key, metric in MEASURED.items()}
    return peaks | {"driver": peaks["driver"] - others, "step_s": steps[-1]["timing_s/step"]}, device.needed / GB


def train(spec: dict[str, Any], folder: Path, steps: int) -> list[dict[str, float]]:
    """Metrics of the first `steps` steps of a run by the engine's own command, which is ended then, without a checkpoint.

    Raises RuntimeError when the run fails.
    """
    (folder / "spec.json").write_text(json.dumps(spec))
    events = folder / "events.jsonl"
    files = ["--spec", folder / "spec.json", "--out", folder / "out", "--events", events]
    engine = subprocess.Popen(
        [sys.executable, "-m", "oppo_core", *map(str, files)], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        return _steps(engine, events, steps)
    finally:
        engine.kill()
        engine.wait()


def used_bytes() -> int:
    """Memory of the GPU that this process and others use."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _steps(engine: subprocess.Popen[bytes], events: Path, count: int) -> list[dict[str, float]]:
    while True:
        lines = events.read_bytes().split(b"\n")[:-1] if events.exists() else []
        steps = [event.metrics for event in map(parse_event, lines) if event.kind == "step"]
        if len(steps) >= count:
            return steps
        if engine.poll() is not None:
            raise RuntimeError(f"the engine ended with status {engine.returncode}")
        time.sleep(0.2)


def _metric(metrics: dict[str, float], name: str) -> float:
    """A metric by its name or, of the driver, by the name's end."""
    return max((value for key, value in metrics.items() if key == name or key.endswith(f"/{name}")), default=0.0)


def main() -> int:
    """Measure, print, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(name for name in CASES if name != "tiny"), help="of " + ", ".join(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names, monitor, results, wrong = options.cases.split(","), LoadMonitor(), list[Result](), list[str]()
    print(f"{'case':18} estimated  allocated   reserved     driver  GB; estimate ÷ allocated, without the reserve for libraries")
    with tempfile.TemporaryDirectory() as scratch:
        prompts = write_prompts(Path(scratch), seed=0)
        for name in names:
            models = Path(scratch) / f"models-{CASES[name][0]}"
            if not models.exists():
                write_models(SHAPES[CASES[name][0]], models)
            folder = Path(scratch) / name
            folder.mkdir()
            try:
                peaks, estimated = measure(name, models, prompts, folder)
            except RuntimeError as error:
                wrong.append(f"{name}: {error}")
                continue
            ratio = (estimated - GPU_RESERVE / GB) / peaks["allocated"] if peaks["allocated"] else 0.0
            cells = "".join(f"{value:11.2f}" for value in (estimated, *(peaks[key] for key in MEASURED)))
            print(f"{name:16}{cells}  {ratio:.3f}  ({peaks['step_s']:.2f} s a step)", flush=True)
            results += [Result.of(f"{name}/{key}_gb", "GB", [peaks[key]]) for key in MEASURED]
            results += [Result.of(f"{name}/estimated_gb", "GB", [estimated]), Result.of(f"{name}/ratio", "ratio", [ratio])]
            if torch.cuda.is_available() and not 1 <= ratio <= MOST_ABOVE:
                wrong.append(f"{name}: the estimate is {ratio:.3f} of the allocated peak")
    if options.json:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        settings = {"seed": 0, "steps": STEPS, "batch": BATCH, "device": device, "torch": torch.__version__, "wrong": wrong}
        write(options.json, document("gpu_memory", monitor.machine(), settings, results))
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0
