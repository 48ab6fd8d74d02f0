"""`oppo cluster`: the scheduling policy on a simulated cluster and stream of submissions."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from oppo_cli.home import Refusal

if TYPE_CHECKING:
    from oppo_bench.cluster import Conduct, Trace

SHAPES = ("steady", "burst", "gangs")
POSITIVE = click.FloatRange(min=0, min_open=True)
SHARE = click.FloatRange(min=0, max=1)


@click.group()
def cluster() -> None:
    """Plan a cluster: simulate its queue, or make a trace to simulate."""


@cluster.command()
@click.argument("trace_file", metavar="TRACE", type=click.File(encoding="utf-8"))
@click.option("--cycle", type=POSITIVE, default=10.0, show_default=True, help="Seconds between two plans, at least.")
@click.option("--checkpoint", type=POSITIVE, default=900.0, show_default=True, help="Seconds of work between two checkpoints.")
@click.option("--restart", type=click.FloatRange(min=0), default=120.0, show_default=True, help="Seconds a preempted run loses.")
@click.option(
    "--measured", type=click.FloatRange(min=0), default=300.0, show_default=True, help="Work after which an end is known."
)
@click.option("--min-runtime", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Same as OPPO_MIN_RUNTIME_S.")
@click.option("--half-life", type=POSITIVE, default=7 * 24 * 3600.0, show_default=True, help="Same as OPPO_USAGE_HALF_LIFE_S.")
@click.option("--window", type=POSITIVE, default=6 * 3600.0, show_default=True, help="Seconds over which shares are compared.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results as JSON.")
def simulate(
    trace_file: IO[str],
    cycle: float,
    checkpoint: float,
    restart: float,
    measured: float,
    min_runtime: float,
    half_life: float,
    window: float,
    json_file: Path | None,
) -> None:
    """Simulate TRACE (- for standard input) under the scheduling policy, FIFO, and FIFO + backfill, and compare.

    Virtual time and the scheduler's own policy: the same trace gives the same figures. docs/scheduling.md explains them.
    """
    from oppo_bench.cluster import Conduct, TraceError, read_trace
    from oppo_platform.scheduling.policy import PolicySettings

    try:
        trace = read_trace(trace_file)
    except TraceError as error:
        raise Refusal(str(error)) from None
    except UnicodeDecodeError:
        raise Refusal("The trace is not text in UTF-8.") from None
    conduct = Conduct(
        cycle_s=cycle,
        checkpoint_s=checkpoint,
        restart_s=restart,
        measured_s=measured,
        policy=PolicySettings(half_life_s=half_life, min_runtime_s=min_runtime),
    )
    _report(trace, conduct, window, json_file)


def _report(trace: Trace, conduct: Conduct, window_s: float, json_file: Path | None) -> None:
    from oppo_bench.cluster.report import PLANNERS, play, print_report, write_results
    from oppo_bench.machine_load import LoadMonitor
    from oppo_cli.simulate_tables import Progress, console

    screen, monitor = console(), LoadMonitor()
    with Progress(screen, len(PLANNERS) * len(trace.submissions)) as progress:
        played = [play(name, trace, conduct, window_s, progress) for name in PLANNERS]
    print_report(screen, trace, conduct, played)
    write_results(trace, conduct, window_s, played, monitor.machine(), json_file)


@cluster.command()
@click.option("--shape", type=click.Choice(SHAPES), default="steady", show_default=True, help="Kind of trace; see below.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The same seed, the same trace.")
@click.option("--runs", type=click.IntRange(1, 1_000_000), default=2000, show_default=True, help="Submissions.")
@click.option("--gpus", type=click.IntRange(1, 100_000), default=256, show_default=True, help="Total GPUs.")
@click.option("--gpus-a-node", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs per node.")
@click.option(
    "--teams", type=click.IntRange(1, 1000), default=5, show_default=True, help="Teams, with equal quotas and unequal demand."
)
@click.option("--load", type=POSITIVE, default=0.9, show_default=True, help="GPU-seconds asked for ÷ available, while runs come.")
@click.option("--median", type=POSITIVE, default=1800.0, show_default=True, help="Median duration in seconds.")
@click.option("--sigma", type=click.FloatRange(0, 4), default=1.5, show_default=True, help="σ of the log-normal durations.")
@click.option("--estimate-sigma", type=click.FloatRange(0, 4), default=0.5, show_default=True, help="σ of estimate ÷ duration.")
@click.option("--estimate-missing", type=SHARE, default=0.2, show_default=True, help="Share of the runs without an estimate.")
@click.option("--bounded", type=SHARE, default=0.3, show_default=True, help="Share of the runs with a max_runtime.")
@click.option("--preemptible", type=SHARE, default=0.85, show_default=True, help="Share of preemptible runs.")
def synthesize(median: float, **recipe: object) -> None:
    """Print a synthetic trace as JSON Lines.

    steady: Poisson arrivals, gangs of 1 to 64, most of them small. burst: the same, and the first team submits 200 runs
    at once.
    gangs: half of the runs want 8 devices or more. Durations are log-normal, cut at a minute and at three days.
    """
    from oppo_bench.cluster import Recipe
    from oppo_bench.cluster import synthesize as made

    try:
        trace = made(Recipe(median_s=median, **recipe))  # type: ignore[arg-type]
    except ValueError as error:
        raise Refusal(str(error)) from None
    for line in trace.lines():
        click.echo(line)
