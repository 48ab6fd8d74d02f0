"""`oppo bench scheduler`: what a cycle takes, and how soon a freed GPU is given away again."""

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

from oppo_cli.bench_report import keep
from oppo_cli.scheduler_load import Load, begin_all, build, drawn

if TYPE_CHECKING:
    from oppo_bench.document import Result

LOADS = (Load(100, 50), Load(1000, 200), Load(3000, 500), Load(10_000, 1000))
QUICK_LOADS = LOADS[:2]
CYCLES, FREED, QUICK = 11, 60, (5, 20)
ENDED_A_CYCLE = 0.05  # of the running runs
PATIENCE_S = 30


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON as well.")
@click.option("--quick", is_flag=True, help="The two smaller clusters, fewer repetitions.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True, help="Seed of everything drawn.")
def scheduler(json_file: Path | None, quick: bool, seed: int) -> None:
    """Time the scheduler's cycles on a real PostgreSQL and broker of their own.

    Ten teams with quotas share nodes of eight GPUs, all in use. Before each timed cycle a twentieth of the runs end; the cycle
    gives their GPUs away, tells every waiting run why it waits, and sends the launch orders.
    """
    from oppo_bench.quiet import Watch

    watch, results = Watch(), []
    cycles, freed = QUICK if quick else (CYCLES, FREED)
    loads = [Load(load.waiting, load.gpus, seed) for load in (QUICK_LOADS if quick else LOADS)]
    with _platform():
        for load in loads:
            click.echo(f"{load.name}: {load.waiting} waiting runs, {load.gpus} GPUs …", err=True)
            build(load)
            results += _cycles(load, cycles)
            if load.waiting == 1000:
                results += _freed_to_dispatch(freed, seed)
            settings = {"seed": seed, "cycles": cycles, "freed": freed, "ended_a_cycle": ENDED_A_CYCLE}
            keep("scheduler", watch.machine(), settings, results, json_file)
    _show(results)
    machine = watch.machine()
    click.echo(f"Load before: {machine.load:.2f}. {machine.complaint or ''}".rstrip())


@contextmanager
def _platform() -> Iterator[None]:
    """PostgreSQL (as in production: commits reach the disk) and a broker, in a folder that is removed afterwards."""
    from oppo_cli.platform_commands import set_up_django
    from oppo_platform import embedded

    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oppo-bench-")))
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
    from oppo_platform.scheduling.cycle import run_cycle

    chance, busy, idle, placed = drawn(load.seed), [], [], 0
    for _ in range(repetitions):
        end_some(chance)
        start = time.perf_counter()
        result = run_cycle()
        busy.append(1e3 * (time.perf_counter() - start))
        assert result is not None, "another scheduler runs on this database"
        placed += result.placed
        begin_all(chance)
        start = time.perf_counter()
        run_cycle()
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
    """From the commit that frees a run's GPUs to the next launch order in the broker, with a scheduler process of its own."""
    import redis
    from django.conf import settings

    from oppo_bench.document import Result
    from oppo_platform.cluster.models import Node

    broker: Any = redis.Redis.from_url(settings.REDIS_URL)
    queues = list(Node.objects.order_by("pk").values_list("queue", flat=True))
    chance, taken = drawn(seed), []
    with _scheduler_process():
        _drain(broker, queues, settle_s=3.0)
        for _ in range(repetitions):
            begin_all(chance)
            end_some(chance, 1)
            start = time.perf_counter()
            if broker.brpop(queues, timeout=PATIENCE_S) is None:
                raise click.ClickException("No launch order came: nothing that waits fits what was freed.")
            taken.append(1e3 * (time.perf_counter() - start))
            _drain(broker, queues, settle_s=0.3)
    ordered = sorted(taken)
    tail = ordered[max(0, round(0.95 * len(ordered)) - 1)]
    return [Result("freed_to_dispatch_ms/p95", "ms", tail, min(taken), max(taken), len(taken)),
            Result.of("freed_to_dispatch_ms", "ms", taken)]  # fmt: skip


def _drain(broker: Any, queues: list[str], settle_s: float) -> None:
    """Take orders out until none came for a while."""
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


def _show(results: list[Result]) -> None:
    from rich.table import Table

    from oppo_bench.tables import console

    table = Table(title="Scheduler", title_justify="left")
    for column in ("figure", "median", "min", "max", "n"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for r in results:
        table.add_row(f"{r.name} [{r.unit}]", f"{r.median:,.1f}", f"{r.min:,.1f}", f"{r.max:,.1f}", str(r.n))
    console().print(table)
