"""`oppo bench scheduler`: duration of a cycle, and time until a freed GPU is assigned again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oppo_bench.report import write_results
from oppo_bench.scheduler.attempts import attempts_per_second
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
ENDED_A_CYCLE = 0.05  # of the running runs
LOOK_AT_OTHERS_S = 3.0
PATIENCE_S = 30
ORDER_WITHIN_S = 5.0  # two of the scheduler's own cycles


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help="The two smaller clusters, fewer repetitions.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of everything drawn.")
def scheduler(json_file: Path | None, quick: bool, seed: int) -> None:
    """Time a run's way to its engine, many short attempts, and the scheduler's cycles, on a real PostgreSQL and broker.

    First the whole platform runs here, with real workers. Then ten teams with quotas share nodes of eight GPUs, all in
    use:
    before each timed cycle a twentieth of the runs end; the cycle assigns their GPUs, records why every queued run waits,
    and sends the launch orders.
    """
    before, results = other_programs(), []
    cycles, freed = QUICK if quick else (CYCLES, FREED)
    starts, attempts = FEW if quick else (STARTS, ATTEMPTS)
    settings = {
        "seed": seed, "cycles": cycles, "freed": freed, "ended_a_cycle": ENDED_A_CYCLE, "starts": starts, "attempts": attempts,
    }  # fmt: skip
    loads = [Load(load.waiting, load.gpus, seed) for load in (QUICK_LOADS if quick else LOADS)]
    with bench_servers():
        click.echo(f"{starts} starts on an idle platform …", err=True)
        results += submit_to_start(starts)
        write_results("scheduler", before, settings, results, json_file)
        click.echo(f"{attempts} short attempts …", err=True)
        results += attempts_per_second(attempts)
        write_results("scheduler", before, settings, results, json_file)
        for load in loads:
            click.echo(f"{load.name}: {load.waiting} waiting runs, {load.gpus} GPUs …", err=True)
            build(load)
            results += _cycles(load, cycles)
            if load.waiting == 1000:
                results += _freed_to_dispatch(freed, seed)
            write_results("scheduler", before, settings, results, json_file)
    show("Scheduler", results)
    _print_stages(results)
    for when, machine in {"before": before, "after": other_programs()}.items():
        click.echo(
            f"Load {when}: {machine.load:.2f}; other programs used {machine.other_cores or 0.0:.2f} cores for a moment {when}."
        )
        if machine.complaint:
            click.echo("Others were busy: do not trust the figures.")


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
        start = time.perf_counter()
        result = run_cycle(kept)
        busy.append(1e3 * (time.perf_counter() - start))
        assert result is not None, "another scheduler runs on this database"
        placed += result.placed
        begin_all(chance)
        start = time.perf_counter()
        run_cycle(kept)
        idle.append(1e3 * (time.perf_counter() - start))
    return [
        Result.of(f"cycle_ms/{load.name}", "ms", busy),
        Result.of(f"quiet_cycle_ms/{load.name}", "ms", idle),
        Result.of(f"placed_a_cycle/{load.name}", "runs", [placed / repetitions]),
    ]


def end_some(chance: random.Random, count: int | None = None) -> None:
    """Let running runs succeed: `count` of them, or a twentieth."""
    from oppo_contract import wire
    from oppo_platform.runs.attempts import finish
    from oppo_platform.runs.models import Attempt, AttemptState

    running = list(Attempt.objects.filter(state=AttemptState.RUNNING).order_by("pk").values_list("pk", "epoch"))
    for attempt_id, epoch in chance.sample(running, count or max(1, round(ENDED_A_CYCLE * len(running)))):
        finish(attempt_id, wire.Outcome(epoch=epoch, outcome="succeeded", exit_code=0, reason=""))


def _freed_to_dispatch(repetitions: int, seed: int) -> list[Result]:
    """Time from the commit that frees a run's GPUs to the next launch order in the broker, with a separate scheduler process.

    Freed GPUs may rightly stay free because the run in front waits for more of them: these cases are counted.
    """
    import redis
    from django.conf import settings

    from oppo_bench.document import Result
    from oppo_platform.cluster.models import Node

    broker: Any = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=PATIENCE_S)
    queues = list(Node.objects.order_by("pk").values_list("queue", flat=True))
    chance, taken, kept_back = generator(seed), [], 0
    with _scheduler_process():
        _drain(broker, queues, settle_s=3.0)
        while len(taken) < repetitions:
            begin_all(chance)
            end_some(chance, 1)
            start = time.perf_counter()
            if broker.brpop(queues, timeout=ORDER_WITHIN_S) is None:
                kept_back += 1  # one of several GPUs that the run in front waits for
                if kept_back > repetitions:
                    raise click.ClickException("Launch orders hardly ever come: nothing that waits fits what is freed.")
                continue
            taken.append(1e3 * (time.perf_counter() - start))
            _drain(broker, queues, settle_s=0.3)
    return [
        Result.tail("freed_to_dispatch_ms/p95", "ms", taken), Result.of("freed_to_dispatch_ms", "ms", taken),
        Result.of("freed_and_kept_back", "times", [kept_back]),
    ]  # fmt: skip


def _drain(broker: Any, queues: list[str], settle_s: float) -> None:
    """Remove orders until none arrives for a while."""
    while broker.brpop(queues, timeout=settle_s) is not None:
        pass


@contextmanager
def _scheduler_process() -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "oppo_cli", "scheduler"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def _print_stages(results: list[Result]) -> None:
    """Print the shares of the time from a click to the engine's first event, by stage."""
    found = {r.name: r.median for r in results}
    legs = {leg: found[f"submit_to_start_s/{leg}"] for leg in LEGS}
    for leg, meaning in LEGS.items():
        click.echo(f"{legs[leg] / sum(legs.values()):6.1%}  {leg:7} {meaning}")
