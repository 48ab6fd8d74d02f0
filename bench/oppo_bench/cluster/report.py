"""Runs, prints and writes `oppo cluster simulate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from oppo_bench.cluster import Conduct, Figures, Planner, Spread, Trace, compute_figures, easy, fifo, simulate
from oppo_bench.document import Result, document, write
from oppo_cli.home import Failure
from oppo_cli.simulate_tables import Progress, duration, percent
from oppo_platform.scheduling import policy

if TYPE_CHECKING:
    from oppo_bench.machine_load import Machine

# Name → planner, and whether it applies quotas.
PLANNERS: Mapping[str, tuple[Planner, bool]] = {
    "policy": (policy.plan, True),
    "fifo": (fifo, False),
    "backfill": (easy, False),
}
TITLES = {"policy": "policy", "fifo": "FIFO", "backfill": "FIFO + backfill"}

HEADINGS = (
    "wait mean", "median", "p95", "longest", "slowdown", "used", "useful", "Jain", "preempted", "lost GPU-h", "frag.", "makespan",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Played:
    """One planner's figures, and the duration of the simulation."""

    name: str
    figures: Figures
    took_s: float


def play(name: str, trace: Trace, conduct: Conduct, window_s: float, progress: Progress) -> Played:
    """Simulate the trace under one planner."""
    planner, quotas = PLANNERS[name]
    began = time.monotonic()
    done = 0

    def ended() -> None:
        nonlocal done
        done += 1
        progress.show(TITLES[name], done)

    outcome = simulate(trace, planner, conduct, quotas=quotas, ended=ended)
    return Played(name, compute_figures(outcome, window_s), time.monotonic() - began)


def print_report(screen: Console, trace: Trace, conduct: Conduct, played: list[Played]) -> None:
    """Print the tables and the settings."""
    devices = sum(pool.nodes * pool.gpus for pool in trace.cluster.pools)
    teams = len(trace.cluster.teams)
    title = f"{trace.name}: {len(trace.submissions):,} runs of {teams} teams on {devices:,} devices in {duration(trace.last_s)}"
    screen.print(_overview(title, played), highlight=False)
    screen.print(_waits("wait by team: mean, p95", played, lambda f: f.wait_by_team), highlight=False)
    screen.print(_waits("wait by devices: mean, p95", played, lambda f: f.wait_by_size), highlight=False)
    took = ", ".join(f"{TITLES[p.name]} {duration(p.took_s)} for {p.figures.plans:,} plans" for p in played)
    screen.print(
        f"Checkpoints every {duration(conduct.checkpoint_s)}, restarts {duration(conduct.restart_s)}; at most a plan every"
        f" {duration(conduct.cycle_s)}. FIFO and FIFO + backfill have neither quotas nor preemption. Simulated in: {took}."
        " What the columns mean: docs/scheduling.md.",
        highlight=False,
        style="dim",
    )


def _overview(title: str, played: list[Played]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in played:
        f = each.figures
        table.add_row(
            TITLES[each.name], duration(f.wait.mean), duration(f.wait.median), duration(f.wait.p95), duration(f.wait.most),
            f"{f.slowdown.p95:.1f} ×", percent(f.utilization), percent(f.useful), f"{f.jain:.2f}", f"{f.preemptions:,}",
            f"{(f.lost_gpu_s + f.restart_gpu_s) / 3600:,.0f}", percent(f.fragmentation), duration(f.makespan_s),
        )  # fmt: skip
    for each in played:
        if each.figures.refused or each.figures.stuck:
            table.caption = "; ".join(
                f"{TITLES[p.name]}: {p.figures.refused} can never start, {p.figures.stuck} were left over" for p in played
            )
    return table


def _waits(title: str, played: list[Played], groups: Callable[[Figures], dict[str, Spread]]) -> Table:
    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("runs", justify="right")
    for each in played:
        table.add_column(TITLES[each.name], justify="right", no_wrap=True)
    for name in dict.fromkeys(name for each in played for name in groups(each.figures)):
        spreads = [groups(each.figures).get(name) for each in played]
        runs = max(spread.n for spread in spreads if spread is not None)
        told = ["–" if spread is None else f"{duration(spread.mean)}, {duration(spread.p95)}" for spread in spreads]
        table.add_row(name, f"{runs:,}", *told)
    return table


def write_results(
    trace: Trace, conduct: Conduct, window_s: float, played: list[Played], machine: Machine, json_file: Path | None
) -> None:
    """Write the figures in the benchmarks' format, if a file was requested. Raises Failure when that is impossible."""
    if json_file is None:
        return
    settings: dict[str, Any] = {
        "trace": trace.name, "submissions": len(trace.submissions), "cluster": trace.cluster.model_dump(mode="json"),
        "conduct": asdict(conduct), "window_s": window_s,
    }  # fmt: skip
    results = [result for each in played for result in _results(f"{trace.name}/{each.name}", each)]
    try:
        write(json_file, document("cluster", machine, settings, results))
    except OSError as error:
        raise Failure(f"{json_file} cannot be written: {error.strerror}.") from error


def _results(prefix: str, played: Played) -> Iterator[Result]:
    figures = played.figures
    spreads = {"wait_s": figures.wait, "slowdown": figures.slowdown}
    spreads |= {f"wait_s/team/{name}": spread for name, spread in figures.wait_by_team.items()}
    spreads |= {f"wait_s/devices/{name}": spread for name, spread in figures.wait_by_size.items()}
    for name, spread in spreads.items():
        unit = "s" if name.startswith("wait_s") else "ratio"
        yield Result(f"{prefix}/{name}", unit, spread.median, spread.least, spread.most, spread.n)
        yield Result.of(f"{prefix}/{name}/mean", unit, [spread.mean])
        yield Result.of(f"{prefix}/{name}/p95", unit, [spread.p95])
    units = {
        "utilization": "share", "useful": "share", "jain": "index", "jain_windows": "count", "preemptions": "count",
        "preempted_most": "count", "lost_gpu_s": "GPU-s", "restart_gpu_s": "GPU-s", "fragmentation": "share", "makespan_s": "s",
        "ended": "count", "refused": "count", "stuck": "count", "plans": "count",
    }  # fmt: skip
    for name, unit in units.items():
        yield Result.of(f"{prefix}/{name}", unit, [float(getattr(figures, name))])
    yield Result.of(f"{prefix}/simulated_in_s", "s", [played.took_s])
