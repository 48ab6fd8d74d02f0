"""`oppo bench engine`: all ways to overlap a PPO step, interleaved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oppo_bench.report import describe_settings, explain, write_results
from oppo_cli.home import Refusal

if TYPE_CHECKING:
    from rich.status import Status

    from oppo_bench.document import Result
    from oppo_bench.engine.race import Plan
    from oppo_bench.engine.workload import Load, Size

DEFAULT_SIZES = {"cpu": "S,M", "cuda": "G1,G2"}
DEFAULT_BATCHES = {"cpu": "16", "cuda": "32"}
# Repetitions, and steps in each; a GPU's sizes must finish within six minutes.
AMOUNT = {"cpu": (5, 4), "cuda": (3, 1)}
MAX_AGE = {"cpu": 3, "cuda": 2}
QUICK = (3, 2)
VOCAB_AT_LEAST = 2048  # prompts have token ids up to here
TOO_NOISY = 1.25  # largest ÷ smallest speed-up


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help=f"Size S only, {QUICK[0]} repetitions of {QUICK[1]} steps by default.")
@click.option("--sizes", help="S, M, L (own architecture), G1, G2 (Qwen2.5-0.5B and 1.5B shapes). Default: S,M; on cuda G1,G2.")
@click.option("--batches", help="B, for instance 8,16,32. Default: 16; on cuda 32.")
@click.option("--variants", help="Which of them, by name. Default: all; on cuda a selection.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of everything drawn.")
@click.option("--reps", type=click.IntRange(min=1), help="Repetitions.")
@click.option("--steps", type=click.IntRange(min=1), help="PPO steps a variant in each repetition.")
@click.option("--max-age", type=click.IntRange(1, 100), help="Most steps for which an answer is deferred. Default: 3; on cuda 2.")
@click.option("--chunk", type=click.IntRange(1, 512), default=16, show_default=True, help="C, tokens between two hand-overs.")
@click.option("--overcommit", type=click.IntRange(1, 256), help="Δ, prompts beyond the batch. Default: half the batch.")
@click.option(
    "--lengths", default="lognormal", show_default=True, help="lognormal, pareto, bimodal, or a file of lengths, 1 to 512."
)
@click.option(
    "--model", type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="Folder of a published model, trained by adapters: prompts of 30 to 200 tokens, responses of 20 to 400.",
)  # fmt: skip
@click.option("--hidden", type=click.IntRange(16, 8192), help="Width of the networks instead of the size's.")
@click.option("--layers", type=click.IntRange(1, 128), help="Layers instead of the size's.")
@click.option("--vocab", type=click.IntRange(VOCAB_AT_LEAST, 2**20), help="Tokens of the vocabulary instead of the size's.")
@click.option("--threads", type=click.IntRange(min=1), help="Cores that every variant may use. Default: all.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where the engine runs.")
def engine(
    json_file: Path | None, quick: bool, sizes: str | None, batches: str | None, variants: str | None, seed: int,
    reps: int | None, steps: int | None, max_age: int | None, chunk: int, overcommit: int | None, lengths: str,
    model: Path | None, hidden: int | None, layers: int | None, vocab: int | None, threads: int | None, device: str,
) -> None:  # fmt: skip
    """Time per trained token and per step of every way to overlap PPO, and their distance from the floor.

    The real engine runs in its own processes with its own threads. Only the lengths of the answers are fixed, so that
    every variant does the same work. Variants take turns step by step.
    """
    from oppo_bench.engine.threads import wait_as_the_engine_does

    wait_as_the_engine_does()  # before torch is imported
    try:
        from oppo_bench.engine.race import Plan
        from oppo_bench.engine.workload import FLOOR, ON_GPU, ON_PUBLISHED, VARIANTS, Lengths, Load
    except ImportError as error:
        raise Refusal(f"The engine is not installed here: {error}. README, “Choosing torch”, says how to install it.") from error

    from oppo_contract.machine import available_cores

    amount = QUICK if quick else AMOUNT[device]
    usual = ON_GPU if device == "cuda" else (*VARIANTS, FLOOR) if model is None else ON_PUBLISHED
    chosen = tuple(_listed(variants, "variant", [*VARIANTS, FLOOR])) if variants else usual
    plan = Plan(reps or amount[0], steps or amount[1], threads or available_cores(), chosen)
    counts = [int(text) for text in _listed(batches or DEFAULT_BATCHES[device], "batch", [str(n) for n in range(2, 257)])]
    if overcommit is not None and overcommit > min(counts):
        raise Refusal(
            f"--overcommit {overcommit} is above batch {min(counts)}: at most a batch of prompts is in flight beyond it."
        )
    shape = {"hidden": hidden, "layers": layers, "vocab": vocab}
    try:
        drawn = Lengths.read(seed, lengths) if model is None else Lengths.read(seed, lengths).for_published_model()
        usual_sizes = "S" if quick and device == "cpu" else DEFAULT_SIZES[device]
        shaped = _sizes(sizes or usual_sizes, shape) if model is None else [_published(model, sizes, shape)]
    except ValueError as error:
        raise Refusal(str(error)) from None
    age = max_age or MAX_AGE[device]
    loads = [Load(*size, batch, drawn, device, age, chunk, overcommit, model) for size in shaped for batch in counts]
    _measure(loads, plan, json_file)


def _sizes(named: str, shape: dict[str, int | None]) -> list[tuple[str, Size]]:
    """Names and sizes of `--sizes`, with parts replaced. Raises ValueError where they do not fit."""
    from oppo_bench.engine.workload import SIZES, reshaped

    return [reshaped(name, shape) for name in _listed(named, "size", list(SIZES))]


def _published(model: Path, sizes: str | None, shape: dict[str, int | None]) -> tuple[str, Size]:
    """Name and size of a published model. Raises ValueError for options that it replaces."""
    from oppo_bench.engine.workload import published_size

    given = ["sizes"] * bool(sizes) + [name for name, value in shape.items() if value is not None]
    if given:
        raise ValueError(f"--{given[0]} does not go with --model {model}, which has its own.")
    return model.name, published_size(model)


def _listed(text: str, what: str, known: list[str]) -> list[str]:
    """Split a comma-separated list. Raises Refusal for an unknown part."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if part not in known:
            some = ", ".join(known) if len(known) < 20 else f"{known[0]} to {known[-1]}"
            raise Refusal(f"There is no {what} {part}; choose from {some}.")
    return parts


def _show_progress(status: Status, case: str, text: str) -> None:
    status.update(f"{case}: {text}")


def _measure(loads: list[Load], plan: Plan, json_file: Path | None) -> None:
    from oppo_bench.engine.race import race, to_results
    from oppo_bench.machine_load import LoadMonitor
    from oppo_bench.tables import case_table, floor_line
    from oppo_cli.simulate_tables import console
    from oppo_contract.model_folder import ModelFolderError
    from oppo_core.engine.layout import LayoutError

    screen, monitor, results, heats = console(), LoadMonitor(), [], {}
    for load in loads:
        with screen.status(load.case) as status:
            show = partial(_show_progress, status, load.case)
            try:
                measured = race(load, plan, monitor, show)
            except (LayoutError, ModelFolderError) as error:
                raise Refusal(str(error)) from None
        figures = to_results(measured)
        results += figures
        heats[load.case] = measured.heats
        screen.print(case_table(load.case, [*plan.variants], figures), highlight=False)
        screen.print(floor_line(load.case, figures), "", sep="\n", highlight=False)
        write_results("engine", monitor.machine(), describe_settings(loads, plan) | {"heats": heats}, results, json_file)
    explain(screen, monitor.machine(), loads[0], plan, max(heats.values()))
    for line in noisy(results):
        screen.print(line, style="bold", highlight=False)


def noisy(results: list[Result]) -> list[str]:
    """A warning for each speed-up whose repetitions differ too much to mean anything."""
    wide = [result for result in results if result.name.endswith("/speedup") and result.max > TOO_NOISY * result.min]
    return [
        f"{result.name.removesuffix('/speedup')}: the repetitions differ too much, {result.min:.2f} to {result.max:.2f} ×."
        " Use more --reps or --steps, or a quiet machine."
        for result in wide
    ]
