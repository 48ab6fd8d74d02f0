"""`oppo bench scheduler`: duration of a cycle, and time until a freed GPU is assigned again."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oppo_bench.report import write_results
from oppo_bench.scheduler.attempts import attempts_per_second
from oppo_bench.scheduler.hand_over import ENDED_A_CYCLE, end_some, freed_to_dispatch
from oppo_bench.scheduler.load import Load, begin_all, build, generator
from oppo_bench.scheduler.submit_to_start import LEGS, submit_to_start
from oppo_bench.tables import show

if TYPE_CHECKING:
    from oppo_bench.document import Result
    from oppo_bench.machine_load import Machine

LOADS = (Load(100, 50), Load(1000, 200), Load(3000, 500), Load(10_000, 1000))
QUICK_LOADS = LOADS[:2]
CYCLES, FREED, QUICK = 11, 60, (5, 20)
STARTS, ATTEMPTS, FEW = 40, 1000, (6, 60)
LOOK_AT_OTHERS_S = 3.0


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help="The two smaller clusters, fewer repetitions.")
@click.option(
    "--peers", is_flag=True, help="Compare with Slurm instead, in turn at every figure; as root, with its Debian packages."
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of everything drawn.")
def scheduler(json_file: Path | None, quick: bool, peers: bool, seed: int) -> None:
    """Time a run's way to its engine, many short attempts, and the scheduler's cycles, on a real PostgreSQL and broker.

    First the whole platform runs here, with real workers. Then ten teams with quotas share nodes of eight GPUs, all in
    use:
    before each timed cycle a twentieth of the runs end; the cycle assigns their GPUs, records why every queued run waits,
    and sends the launch orders.
    """
    from oppo_bench.scheduler.race import race

    before, results = other_programs(), []
    cycles, freed = QUICK if quick else (CYCLES, FREED)
    starts, attempts = FEW if quick else (STARTS, ATTEMPTS)
    settings = {"seed": seed, "cycles": cycles, "freed": freed, "ended_a_cycle": ENDED_A_CYCLE, "starts": starts}
    loads = [Load(load.waiting, load.gpus, seed) for load in (QUICK_LOADS if quick else LOADS)]
    with bench_servers():
        measure_ours = partial(_measure_ours, starts, attempts, loads, cycles, freed)
        with closing(race(starts, cycles, freed, seed, _progress) if peers else measure_ours()) as figures:
            for measured in figures:
                results += measured
                write_results("scheduler", before, settings | ({} if peers else {"attempts": attempts}), results, json_file)
    show("Scheduler", results)
    if not peers:
        _print_stages(results)
    for when, machine in {"before": before, "after": other_programs()}.items():
        click.echo(
            f"Load {when}: {machine.load:.2f}; other programs used {machine.other_cores or 0.0:.2f} cores for a moment {when}."
        )
        if machine.complaint:
            click.echo("Others were busy: do not trust the figures.")


def _progress(text: str) -> None:
    click.echo(f"{text} …", err=True)


def _measure_ours(starts: int, attempts: int, loads: Sequence[Load], cycles: int, freed: int) -> Generator[list[Result]]:
    _progress(f"{starts} starts on an idle platform")
    yield submit_to_start(starts)
    _progress(f"{attempts} short attempts")
    yield attempts_per_second(attempts)
    for load in loads:
        _progress(f"{load.name}: {load.waiting} waiting runs, {load.gpus} GPUs")
        build(load)
        yield _cycles(load, cycles)
        if load.waiting == 1000:
            yield freed_to_dispatch(freed, load.seed)


def other_programs() -> Machine:
    """Cores that other programs use while the benchmark is idle, its own servers excluded."""
    from oppo_bench.machine_load import LoadMonitor

    monitor = LoadMonitor()
    time.sleep(LOOK_AT_OTHERS_S)
    return monitor.machine()


@contextmanager
def bench_servers() -> Iterator[None]:
    """PostgreSQL (as in production: commits reach the disk) and a broker, in a folder that is removed afterwards."""
    from oppo_cli.platform_commands import set_up_django
    from oppo_platform import embedded

    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oppo-bench-")))
        for server in (embedded.PostgresServer(home), embedded.ValkeyServer(home)):
            stack.callback(server.remove_data)  # as root it is elsewhere
        os.environ["DATABASE_URL"] = stack.enter_context(embedded.postgres(home))
        os.environ["REDIS_URL"] = stack.enter_context(embedded.valkey(home))
        os.environ["OPPO_HOME"] = str(home)
        set_up_django()
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", verbosity=0)
        stack.callback(connections.close_all)
        yield


def _cycles(load: Load, repetitions: int) -> list[Result]:
    from oppo_bench.document import Result
    from oppo_platform.scheduling.cycle import Kept, run_cycle

    kept = Kept()
    run_cycle(kept)
    chance, busy, idle, placed = generator(load.seed), [], [], 0
    for _ in range(repetitions):
        end_some(chance)
        result = run_cycle(kept)
        begin_all(chance)
        quiet = run_cycle(kept)
        assert result is not None, "another scheduler runs on this database"
        assert quiet is not None
        placed += result.placed
        busy.append(1e3 * result.took_s)
        idle.append(1e3 * quiet.took_s)
    return [
        Result.of(f"cycle_ms/{load.name}", "ms", busy),
        Result.of(f"quiet_cycle_ms/{load.name}", "ms", idle),
        Result.of(f"placed_a_cycle/{load.name}", "runs", [placed / repetitions]),
    ]


def _print_stages(results: list[Result]) -> None:
    """Print the shares of the time from a click to the engine's first event, by stage."""
    found = {r.name: r.median for r in results}
    legs = {leg: found[f"submit_to_start_s/{leg}"] for leg in LEGS}
    for leg, meaning in LEGS.items():
        click.echo(f"{legs[leg] / sum(legs.values()):6.1%}  {leg:7} {meaning}")
