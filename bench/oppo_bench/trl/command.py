"""`oppo bench trl`: the engine against TRL's PPOTrainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oppo_bench.report import describe_settings, explain, write_results
from oppo_cli.home import Failure, Home, Refusal

if TYPE_CHECKING:
    from oppo_bench.engine.race import Plan
    from oppo_bench.engine.workload import Load

SIZE, BATCH = "M", 16
AMOUNT, QUICK = (5, 2), (2, 1)


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help=f"{QUICK[0]} repetitions of {QUICK[1]} step by default.")
@click.option(
    "--env", "folder", type=click.Path(file_okay=False, path_type=Path),
    help="TRL's environment; made when it is missing, as is …-today beside it. Default: bench/trl in OPPO_HOME.",
)  # fmt: skip
@click.option(
    "--model", type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="Folder of a published model, trained by adapters: prompts of 30 to 200 tokens, responses of 20 to 400.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of everything drawn.")
@click.option("--reps", type=click.IntRange(min=1), help=f"Repetitions. Default: {AMOUNT[0]}.")
@click.option("--steps", type=click.IntRange(min=1), help=f"PPO steps in each repetition. Default: {AMOUNT[1]}.")
@click.option(
    "--max-age", type=click.IntRange(1, 100), default=3, show_default=True, help="Most steps for which an answer is deferred."
)
@click.option("--threads", type=click.IntRange(min=1), help="Cores for each side. Default: all.")
def trl(
    json_file: Path | None, quick: bool, folder: Path | None, model: Path | None, seed: int, reps: int | None, steps: int | None,
    max_age: int, threads: int | None,
) -> None:  # fmt: skip
    """Time per trained token of TRL 1.12.0's PPOTrainer and of the engine on the same work: B = 16, by default size M.

    With --model also of TRL 1.16.0's GRPOTrainer and of the engine's GRPO.

    Both load the same checkpoint and train answers of the same fixed lengths, in one epoch and one mini-batch, in
    float32, on the same threads, in turn. TRL has its own environment, which is created the first time (some minutes).
    """
    from oppo_bench.engine.threads import wait_as_the_engine_does

    wait_as_the_engine_does()  # before torch is imported
    try:
        from oppo_bench.engine.race import Plan
        from oppo_bench.engine.workload import SIZES, Lengths, Load, published_size
    except ImportError as error:
        raise Refusal(f"The engine is not installed here: {error}. README, “Choosing torch”, says how to install it.") from error

    from oppo_contract.machine import available_cores

    amount = QUICK if quick else AMOUNT
    plan = Plan(reps or amount[0], steps or amount[1], threads or available_cores())
    place = folder.resolve() if folder is not None else Home.from_environment().path / "bench" / "trl"
    load = Load(SIZE, SIZES[SIZE], BATCH, Lengths(seed), max_age=max_age)
    if model is not None:
        try:
            size, lengths = published_size(model), load.lengths.for_published_model()
            load = replace(load, name=model.name, size=size, lengths=lengths, model=model)
        except ValueError as error:
            raise Refusal(str(error)) from None
    _measure(load, plan, place, json_file)


def _measure(load: Load, plan: Plan, place: Path, json_file: Path | None) -> None:
    from oppo_bench.machine_load import LoadMonitor
    from oppo_bench.peer_environment import TRL, TRL_TODAY, PeerEnvironmentError, ensure_environment
    from oppo_bench.tables import peer_table
    from oppo_bench.trl.race import PeerError, Pythons, race
    from oppo_cli.simulate_tables import console
    from oppo_contract.model_folder import ModelFolderError

    screen = console()
    with screen.status(load.case) as status:
        try:
            pythons = Pythons(ensure_environment(place, TRL, status.update))
            if load.model is not None:
                today = place.with_name(f"{place.name}-today")
                pythons = replace(pythons, grpo=ensure_environment(today, TRL_TODAY, status.update))
            monitor = LoadMonitor()
            figures = race(load, plan, pythons, monitor, lambda text: status.update(f"{load.case}: {text}"))
        except (PeerEnvironmentError, PeerError, ModelFolderError) as error:
            raise Failure(str(error)) from error
    screen.print(peer_table(load.case, figures.results), highlight=False)
    machine, details = monitor.machine(), {"trl_environment": [*TRL.first, *TRL.pins], "heats": figures.heats}
    write_results("trl", machine, describe_settings([load], plan) | details, figures.results, json_file)
    explain(screen, machine, load, plan, figures.heats)
