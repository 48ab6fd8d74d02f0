"""The command line of the GPU benchmark: what to measure, for how long, and the report."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from oppo_bench.document import Result, commit, document, write
from oppo_bench.engine.workload import write_prompts
from oppo_bench.gpu import decode_steps, updates
from oppo_bench.gpu.cases import ADAPTED, MEANING, OVERLAP, SHAPES, UPDATES, VLLM, Cell, plan_order, select_cells
from oppo_bench.gpu.check import Finding, findings
from oppo_bench.gpu.figures import findings_as_results, stage_lines, table, to_results
from oppo_bench.gpu.floor import Ceilings
from oppo_bench.gpu.racing import GB, Clock, Race, Track, all_on_one_device, run
from oppo_bench.gpu.random_models import ModelSet
from oppo_bench.machine_load import LoadMonitor
from oppo_contract.machine import available_cores
from oppo_core.trace.gpu_stats import build_gpu_stats

OK, WRONG, REFUSED = 0, 1, 2
SECONDS = 400.0  # eight minutes, less start-up and the overrun of the last repetition
LEAST_S = {"cuda": 20.0, "cpu": 1.0}  # a cell with less time is left out
NO_GPU = "python bench/gpu: torch sees no GPU here; --device cpu --sizes tiny tries the command without one"
SPANS = "a stage's time is from where the device begins with its work to where it is done, pauses between kernels included"


@dataclass(slots=True)
class Report:
    """Everything for the result file."""

    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    parts: dict[str, dict[str, str]] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    """Measure; 0: all checks pass, 1: a check failed, 2: no device to measure on."""
    options = _parser().parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return REFUSED
    warnings.filterwarnings("ignore", category=FutureWarning)
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    if VLLM in (options.variants or []) and (device.type != "cuda" or importlib.util.find_spec("vllm") is None):
        print("python bench/gpu: vllm needs a GPU and its wheel", file=sys.stderr)
        return REFUSED
    clock, monitor, report = Clock(options.seconds), LoadMonitor(), Report()
    cells = select_cells(options.sizes, options.batches, options.variants)
    planned = plan_order(cells, options.updates == "on")
    _introduce(cells, device, options)
    scratch = Path(tempfile.mkdtemp(prefix="oppo-gpu-"))
    try:
        for size in dict.fromkeys(cell.size for cell in planned):
            _measure_size(
                [cell for cell in planned if cell.size == size], planned, device, options, clock, scratch / size, report
            )
            _write(report, device, options, monitor)  # what has been measured outlives a time limit
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not any(VLLM in cell.variants for cell in cells):
        report.left_out.append(f"vllm: {_vllm()}")
    _print_summary(report)
    _write(report, device, options, monitor)
    return WRONG if report.wrong else OK


def _write(report: Report, device: torch.device, options: argparse.Namespace, monitor: LoadMonitor) -> None:
    if not options.json:
        return
    settings = {"seed": 1, "device": _name(device), "torch": torch.__version__, "seconds": options.seconds} | {
        "date": time.strftime("%Y-%m-%d"),
        "parts": report.parts, "left_out": report.left_out, "wrong": report.wrong, "spans": SPANS,
    }  # fmt: skip
    write(options.json, document("gpu", monitor.machine(), settings, report.results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python bench/gpu", description="What overlapping PPO's stages is worth on a GPU.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try the command")
    parser.add_argument("--sizes", type=_names(SHAPES), help="comma-separated, of " + ", ".join(SHAPES))
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], help="comma-separated; default: all"
    )
    parser.add_argument("--variants", type=_names(OVERLAP), help="comma-separated; default: all that are planned for a size")
    parser.add_argument("--updates", choices=["on", "off"], default="on", help="what recomputation and packing cost and save")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="what does not fit into this time is left out, and said")
    parser.add_argument("--repetitions", type=int, default=5, help="of two steps each, at most")
    parser.add_argument(
        "--profile", action="store_true", help="one step more of each variant under torch's profiler: its kernels"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.set_defaults(sizes=[size for size in SHAPES if size != "tiny"])
    return parser


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return names

    return parse


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _introduce(cells: list[Cell], device: torch.device, options: argparse.Namespace) -> None:
    memory = f", {torch.cuda.get_device_properties(device).total_memory / GB:.0f} GB" if device.type == "cuda" else ""
    print(f"{_name(device)}{memory}; torch {torch.__version__}; commit {commit()}; {time.strftime('%Y-%m-%d')}")
    if device.type == "cpu":
        print("A trial of the command on a CPU: its figures say nothing about a GPU.")
    for lengths in dict.fromkeys(cell.lengths for cell in cells):
        print(
            f"answers: log-normal lengths, median {lengths.median:g}, sigma {lengths.sigma:g}, 1 to {lengths.longest} tokens,"
            f" imposed on each request by its number and seed {lengths.seed}, the same for every variant"
        )
    for name in dict.fromkeys(name for cell in cells for name in cell.variants):
        print(f"{name}: {MEANING[name]}")
    print(SPANS)


def _measure_size(
    cells: list[Cell],
    planned: list[Cell],
    device: torch.device,
    options: argparse.Namespace,
    clock: Clock,
    folder: Path,
    report: Report,
) -> None:
    """All cells of one size, and the checks after the first of them."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if clock.left < LEAST_S[device.type]:
        report.left_out += [f"{_named(cell)}: no time left" for cell in cells]
        return
    load = cells[0].load(device.type)
    if reason := _too_large(cells[0].size, device):
        report.left_out += [f"{_named(cell)}: {reason}" for cell in cells]
        return
    folder.mkdir(parents=True)
    prompts = write_prompts(folder, load.lengths.seed)
    models = ModelSet(load, folder / "roles", device)
    ceilings = Ceilings.measured(device, getattr(torch, load.size.dtype))
    report.results += _ceilings(cells[0].size, ceilings)
    for number, cell in enumerate(cells):
        seconds = clock.left * cell.weight / sum(later.weight for later in planned[planned.index(cell) :])
        if cell in UPDATES:
            _update(cell, models, device, options, seconds, report)
            continue
        race = _race(cell, models, prompts, folder / str(cell.batch), device, options, seconds, report)
        _print_race(race, to_results(race, ceilings), report)
        if number == 0:
            _decode_steps(cell.size, models, race, report)
            _print_checks(cell.size, findings(models, load, race.kind), report)


def _race(
    cell: Cell, models: ModelSet, prompts: Path, folder: Path, device: torch.device, options: argparse.Namespace, seconds: float,
    report: Report,
) -> Race:  # fmt: skip
    race = Race(cell, cell.load(device.type))
    if seconds < LEAST_S[device.type]:
        report.left_out.append(f"{cell.case}: no time left")
        return race
    driver = build_gpu_stats({str(device): device})
    threads = 1 if device.type == "cuda" else available_cores()
    track = Track(
        models, prompts, folder, device, threads, driver, seconds, options.repetitions, _print_progress, options.profile
    )
    try:
        if device.type == "cpu":
            with all_on_one_device():
                run(race, track)
        else:
            run(race, track)
    finally:
        driver.close()
    return race


def _named(cell: Cell) -> str:
    return f"{cell.case}, updates" if cell in UPDATES else cell.case


def _update(
    cell: Cell, models: ModelSet, device: torch.device, options: argparse.Namespace, seconds: float, report: Report
) -> None:
    if seconds < LEAST_S[device.type]:
        report.left_out.append(f"{_named(cell)}: no time left")
        return
    results = updates.measure(cell, models, device, options.repetitions, seconds, _print_progress)
    report.results += results
    print("\n" + "\n".join(updates.lines(cell, results)))


def _vllm() -> str:
    """Why vLLM is not among the variants."""
    if importlib.util.find_spec("vllm") is None:
        return "its wheel is not installed"
    return f"in a run of its own: --sizes 0.5B --batches 32 --variants both,{','.join(VLLM)}"


def _too_large(size: str, device: torch.device) -> str | None:
    """Why a size does not fit on the device."""
    if size in ADAPTED and importlib.util.find_spec("peft") is None:
        return "peft is not installed, and only adapters fit"
    if device.type == "cpu":
        return None
    free = torch.cuda.mem_get_info(device)[0]
    shape = SHAPES[size]
    number = 2 if size in ADAPTED else 2 + 2 * 22  # the frozen backbone; actor and critic with their training state
    needed = shape.parameters * number
    return f"weights and optimizers need about {needed / GB:.0f} GB, {free / GB:.0f} are free" if needed > free else None


def _ceilings(size: str, ceilings: Ceilings) -> list[Result]:
    print(f"{size}: measured {ceilings.bytes_per_s / 1e9:,.0f} GB/s, {ceilings.flops_per_s / 1e12:,.2f} TFLOP/s")
    return [
        Result.of(f"{size}/ceiling/gb_per_s", "GB/s", [ceilings.bytes_per_s / 1e9]),
        Result.of(f"{size}/ceiling/tflop_per_s", "TFLOP/s", [ceilings.flops_per_s / 1e12]),
    ]


def _decode_steps(size: str, models: ModelSet, race: Race, report: Report) -> None:
    results = decode_steps.measure(size, models.networks["reference"], race.kind)
    report.results += results
    print(f"{size}: {decode_steps.line(results, race.load.size.layers)}")


def _print_checks(size: str, found: list[Finding], report: Report) -> None:
    report.results += findings_as_results(size, found)
    for finding in found:
        verdict = "reported only" if finding.limit is None else "right" if finding.fine else "WRONG"
        print(f"{size}: {finding.words}: {finding.seen:.3g} ({verdict}, at most {finding.limit})")
        if not finding.fine:
            report.wrong.append(f"{size}: {finding.words}: {finding.seen:.3g}, above {finding.limit}")


def _print_race(race: Race, results: list[Result], report: Report) -> None:
    report.results += results
    report.left_out += race.left_out
    report.parts[race.cell.case] = race.parts
    if not race.blocks:
        return
    repetitions = max(map(len, race.blocks.values()))
    print(f"\n{race.cell.case}, medians of {repetitions} repetitions, decoder and scorers as the engine chose:")
    for line in (*table(race, results), *stage_lines(race, results)):
        print(line)
    print("; ".join(f"{name}: {parts}" for name, parts in race.parts.items()))
    for name, profiled in race.profiles.items():
        print("\n".join(profiled.lines(name)))


def _print_summary(report: Report) -> None:
    for line in report.left_out:
        print(f"left out: {line}")
    for line in report.wrong:
        print(f"WRONG: {line}", file=sys.stderr)


def _print_progress(line: str) -> None:
    """Print progress: on one line of a terminal, or with the time in a log."""
    start, end = ("\r\x1b[2K", "") if sys.stderr.isatty() else (f"{time.strftime('%X')} ", "\n")
    print(f"{start}{line}", end=end, file=sys.stderr, flush=True)
