"""How far is the estimate from the resident memory of a run on a CPU? `python bench/resident_memory.py MODEL [--json FILE]`

MODEL is the folder of a published language model (`oppo example smollm2`). Each case is a run of a few steps by the engine's own
command. The synthetic ones have random prompts of equal length, whose responses hardly ever end before the limit, as the estimate
assumes; the others are the example `smollm2/sentiment` with its own prompts, which are shorter than they may be. Prints what the
submit form plans beside the peak of `perf/max_rss_gb`. Exit status 1 if these differ by more than 10 % in any case.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from oppo_bench.document import Result
from oppo_bench.engine.workload import write_prompts
from oppo_bench.gpu.memory import GB, train
from oppo_bench.machine_load import LoadMonitor
from oppo_bench.report import write_results
from oppo_contract.spec import load_spec
from oppo_contract.yaml_text import load_yaml
from oppo_estimate.device_memory import Host, planned_devices
from oppo_estimate.shapes import read_shape

TARGET, PROMPT = 0.10, 16
STEPS, EXAMPLE_STEPS = 4, 8  # the example's memory grew until its sixth step
EXAMPLE = Path(__file__).parents[3] / "examples" / "smollm2" / "sentiment.yaml"
SEQUENTIAL = {"overlap": {"intra_step": "off", "inter_step": "off"}}
ADAPTERS = {"lora": {"rank": 16}}
# Settings by section. `response`: tokens; `rows`: B.
CASES: dict[str, dict[str, Any]] = {
    "adapters": {"models": ADAPTERS, "response": 48, "rows": 16},
    "adapters, long": {"models": ADAPTERS, "response": 128, "rows": 24},
    "adapters, sequential": {"models": ADAPTERS, "response": 96, "rows": 16, **SEQUENTIAL},
    "all weights": {"response": 48, "rows": 16},
    "all weights, small passes": {"response": 96, "rows": 16, "tokens": 1024},
    "all weights, sequential": {"response": 96, "rows": 16, "tokens": 1024, **SEQUENTIAL},
    "example": {"example": True},
    "example, sequential": {"example": True, **SEQUENTIAL},
}


def spec_of(model: Path, prompts: Path, case: dict[str, Any]) -> dict[str, Any]:
    """The run of a case."""
    if "example" in case:
        return example_of(model, case.get("overlap", {}))
    models = {"actor": {"path": str(model)}, "critic": "actor", "reward": {"rule": "sentiment:compound"}}
    return {
        "name": "memory", "steps": STEPS + 1, "data": {"prompts": str(prompts)}, "models": models | case.get("models", {}),
        "ppo": {"batch_size": case["rows"], "learning_rate": 1e-6, "micro_batch_tokens": case.get("tokens", 8192)},
        "rollout": {"max_new_tokens": case["response"], "max_prompt_tokens": PROMPT},
        "overlap": case.get("overlap", {}), "resources": {"kind": "cpu"}, "checkpoints": {"every_steps": 1000},
    }  # fmt: skip


def example_of(model: Path, overlap: dict[str, Any]) -> dict[str, Any]:
    """The shipped example, with the model's folder and the prompts beside it."""
    spec = load_yaml(EXAMPLE.read_text()).model_dump(mode="json")
    spec["models"]["actor"]["path"] = str(model)
    for section in ("data", "evaluation"):
        spec[section]["prompts"] = str(model.parent / Path(spec[section]["prompts"]).name)
    return spec | {"overlap": spec["overlap"] | overlap, "resources": {"kind": "cpu"}}


def planned_gb(spec: dict[str, Any]) -> float:
    """What the submit form plans for one device, GB."""
    run = load_spec(spec)
    shapes = {
        role: read_shape(model, "lm" if role in ("actor", "reference") else "scalar", [])
        for role, model in run.role_models().items()
    }
    host = Host(psutil.virtual_memory().total, os.cpu_count() or 1, gpu=False)
    known = {role: shape for role, shape in shapes.items() if shape is not None}
    return planned_devices(run, known, host, transformers=True)[0].needed / GB


def main() -> int:
    """Measure, print, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", default=None, help="separated by semicolons, of: " + "; ".join(CASES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    monitor, results, wrong = LoadMonitor(), list[Result](), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        prompts = write_prompts(Path(scratch), seed=0, tokens=(PROMPT, PROMPT))
        for name in options.cases.split(";") if options.cases else CASES:
            folder = Path(scratch) / name
            folder.mkdir()
            spec = spec_of(options.model.resolve(), prompts, CASES[name])
            planned, steps = planned_gb(spec), train(spec, folder, EXAMPLE_STEPS if "example" in CASES[name] else STEPS)
            peak = max(step["perf/max_rss_gb"] for step in steps)
            print(f"{name:28} planned {planned:6.2f} GB   peak {peak:6.2f} GB   {planned / peak - 1:+.1%}", flush=True)
            results += [Result.of(f"{name}/planned_gb", "GB", [planned]), Result.of(f"{name}/peak_gb", "GB", [peak])]
            if abs(planned / peak - 1) > TARGET:
                wrong.append(f"{name}: planned {planned:.2f} GB, peak {peak:.2f} GB")
    settings = {"seed": 0, "steps": STEPS, "model": options.model.name, "wrong": wrong}
    write_results("resident_memory", monitor.machine(), settings, results, options.json)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0
