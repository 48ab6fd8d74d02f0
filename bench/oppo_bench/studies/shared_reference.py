"""What does the reference of a run with adapters take? `python bench/shared_reference.py [--json FILE]`

Trains one step with low-rank adapters, once with a reference that is loaded for itself and once with the one that is the actor
without its adapters, sequentially in one process and streamed to the scorers' process. Told is the proportional set size of all
processes at the end of the step: a page that two of them share counts for each as a half. The settings take turns, each run in
processes of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from oppo_bench.document import Result, document, write
from oppo_bench.machine_load import Watch

SETTINGS = {f"{reference}/{intra}": (reference, intra) for intra in ("off", "per_chunk") for reference in ("loaded", "shared")}
SMALL = {"hidden": 8, "layers": 1, "heads": 1}  # the reward model
MIB = 2**20


def tree(folder: Path, shape: dict[str, int], reference: str, intra: str) -> dict[str, Any]:
    """The spec of one run."""
    tiny = {"tiny": shape}
    models: dict[str, Any] = {"actor": tiny, "reward": {"model": {"tiny": shape | SMALL}}, "lora": {"rank": 8}}
    if reference == "loaded":
        models["reference"] = tiny
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": [3 + n, 4, 5]}) + "\n" for n in range(8)))
    return {
        "name": "shared reference", "steps": 1, "models": models, "data": {"prompts": str(prompts)},
        "ppo": {"batch_size": 4, "micro_batch_tokens": 64, "algorithm": "rloo", "group_size": 2},
        "rollout": {"max_new_tokens": 16, "max_prompt_tokens": 8},
        "overlap": {"intra_step": intra, "inter_step": "off"}, "resources": {"dtype": "float32", "kind": "cpu"},
    }  # fmt: skip


def one(spec: dict[str, Any], folder: Path) -> int:
    """Train a step in this process; bytes of it and of its children then."""
    from oppo_contract.spec import load_spec
    from oppo_core.engine.build import assemble
    from oppo_core.reporting import step_report
    from oppo_core.reporting.event_log import Journal
    from oppo_core.train import train_step

    engine = assemble(load_spec(spec), [], folder / "out", Journal(folder / "out" / "events.jsonl"), 2)
    step_report.started(engine)
    train_step(engine, engine.clock())
    children = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    taken = sum(_bytes_of(pid) for pid in (os.getpid(), *children))
    engine.scorers.close()
    return taken


def _bytes_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (told,) = [line for line in lines if line.startswith("Pss:")]
    return int(told.split()[1]) * 1024


def measured(shape: dict[str, int], setting: str) -> int:
    """Bytes of a run under a setting, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        spec = json.dumps(tree(Path(folder), shape, *SETTINGS[setting]))
        command = [sys.executable, __file__, "--one", spec, "--folder", folder]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(told.splitlines()[-1])


def main() -> None:
    """Measure, print a table, and write the bench format when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(one(json.loads(options.one), options.folder))
        return
    shape = {"hidden": options.hidden, "layers": options.layers, "heads": 8, "context": 64, "vocab": 2048}
    watch, taken = Watch(), {name: list[int]() for name in SETTINGS}
    for _ in range(options.repetitions):
        for name, values in taken.items():
            values.append(measured(shape, name))
    results = [Result.of(f"{name}/pss_mb", "MiB", [value / MIB for value in values]) for name, values in taken.items()]
    weights = options.layers * 12 * options.hidden**2 + (2048 + 64) * options.hidden
    print(f"about {4 * weights / MIB:,.0f} MiB of weights, {options.repetitions} runs each in turns, {time.strftime('%Y-%m-%d')}")
    for result in results:
        print(f"{result.name:24}{result.median:10,.0f} MiB   {result.min:,.0f}–{result.max:,.0f}")
    if options.json:
        write(options.json, document("shared_reference", watch.machine(), {"shape": shape}, results))
