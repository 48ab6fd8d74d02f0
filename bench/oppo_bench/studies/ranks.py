"""What ranks and sharding cost on the same cores: `python bench/ranks.py [--repetitions N] [--steps N] [--json FILE]`

Each variant trains the same run (hidden 256, 4 layers, B = 16, answers of 64 tokens) in processes of its own, on two cores: one
rank with two threads, or two ranks with one thread each, with whole weights or sharded by FSDP2. The variants alternate; a figure
is the median of all steps but the first ones of each run, and its ratio to one rank with whole weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from oppo_bench.document import Result, document, write
from oppo_bench.engine.workload import SIZES, VOCAB, write_prompts
from oppo_bench.machine_load import Machine
from oppo_contract.events import parse_event

CORES, LEFT_OUT = 2, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"resources": {"processes": 2}},
    "one rank, FSDP2": {"training": {"backend": "fsdp2"}},
    "two ranks, FSDP2": {"resources": {"processes": 2}, "training": {"backend": "fsdp2"}},
}


def spec(changes: dict[str, Any], steps: int, prompts: Path) -> dict[str, Any]:
    """The run of a variant. Random weights hardly ever sample the end token, so all answers have the longest length."""
    size = SIZES["M"]
    model = {"tiny": {"hidden": size.hidden, "layers": size.layers, "heads": size.heads, "context": 128, "vocab": VOCAB}}
    return {
        "name": "ranks", "steps": steps, "models": {"actor": model, "critic": "actor", "reward": {"model": model}},
        "data": {"prompts": str(prompts)}, "ppo": {"batch_size": 16},
        "rollout": {"max_new_tokens": 64, "max_prompt_tokens": 16}, "overlap": {"intra_step": "off", "inter_step": "off"},
        "resources": {"kind": "cpu", **changes.get("resources", {})}, "training": changes.get("training", {}),
        "checkpoints": {"every_steps": steps},
    }  # fmt: skip


def step_seconds(name: str, folder: Path, steps: int, prompts: Path) -> list[float]:
    """Seconds of each measured step of one run of a variant."""
    changes = VARIANTS[name]
    (folder / "spec.json").write_text(json.dumps(spec(changes, steps, prompts)))
    ranks = changes.get("resources", {}).get("processes", 1)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    files = ["--spec", folder / "spec.json", "--out", folder / "out", "--events", folder / "events.jsonl", "--threads", CORES]
    subprocess.run(
        [sys.executable, *launcher, "-m", "oppo_core", *map(str, files)], check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(CORES // ranks)},
    )  # fmt: skip
    events = map(parse_event, (folder / "events.jsonl").read_bytes().splitlines())
    return [event.metrics["timing_s/step"] for event in events if event.kind == "step"][LEFT_OUT:]


def main() -> None:
    """Measure, print a table, and write the benchmark format if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = Machine(os.cpu_count() or 1, os.getloadavg()[0], None)
    medians: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as scratch:
        prompts = write_prompts(Path(scratch), seed=0)
        for number in range(options.repetitions):
            for name in VARIANTS:
                folder = Path(scratch) / f"{number} {name}"
                folder.mkdir()
                medians[name].append(median(step_seconds(name, folder, options.steps, prompts)))
    results = [Result.of(f"{name}/step_s", "s", values) for name, values in medians.items()]
    first = medians["one rank"]
    results += [
        Result.of(f"{name}/ratio", "×", [value / base for value, base in zip(values, first, strict=True)])
        for name, values in medians.items()
    ]
    for result in results:
        print(f"{result.name:28} {result.median:8.3f} {result.unit:2} ({result.min:.3f}–{result.max:.3f}, n = {result.n})")
    if options.json:
        settings = {
            "repetitions": options.repetitions,
            "steps": options.steps,
            "run": spec({}, options.steps, Path("prompts.jsonl")),
        }
        write(options.json, document("ranks", machine, settings, results))
