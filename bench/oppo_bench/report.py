"""Shared by the engine's benchmarks: settings, result file, and the text below their tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oppo_cli.home import Failure

if TYPE_CHECKING:
    from rich.console import Console

    from oppo_bench.document import Result
    from oppo_bench.engine.race import Plan
    from oppo_bench.engine.workload import Load
    from oppo_bench.machine_load import Machine


def describe_settings(loads: list[Load], plan: Plan) -> dict[str, Any]:
    """All settings that influence the figures, besides the machine."""
    from importlib.metadata import version

    from oppo_bench.engine.threads import thread_settings

    first = loads[0]
    return {
        "seed": first.lengths.seed, "lengths": asdict(first.lengths), "repetitions": plan.repetitions, "steps": plan.steps,
        "left_out": first.left_out, "threads": plan.threads, "environment": thread_settings(), "torch": version("torch"),
        "device": first.device, "max_age": first.max_age, "chunk": first.chunk,
        "overcommit": {str(load.batch): load.overcommit for load in loads},
        "sizes": {load.name: asdict(load.size) for load in loads},
    }  # fmt: skip


def write_results(bench: str, machine: Machine, settings: dict[str, Any], results: list[Result], json_file: Path | None) -> None:
    """Write the results so far, if a file was requested. Raises Failure when that is impossible."""
    from oppo_bench.document import document, write

    if json_file is None:
        return
    try:
        write(json_file, document(bench, machine, settings, results))
    except OSError as error:
        raise Failure(f"{json_file} cannot be written: {error.strerror}.") from error


def explain(screen: Console, machine: Machine, load: Load, plan: Plan, heats: int = 1) -> None:
    """Print how the figures were measured, and whether the machine was quiet."""
    busy = "" if machine.other_cores is None else f", other programs used {machine.other_cores:.2f} cores meanwhile"
    screen.print(
        f"{plan.repetitions} repetitions of {plan.steps} steps, variants in turn, the first {load.left_out} steps left out, on"
        f" {plan.threads} threads; median of the repetitions. Load before: {machine.load:.2f}{busy}.",
        highlight=False,
        style="dim",
    )
    if machine.complaint:
        screen.print(machine.complaint, style="bold", highlight=False)
    if heats > 1:
        screen.print("Not all engines fit into memory at once: they ran in heats, so their moments differ.", highlight=False)
