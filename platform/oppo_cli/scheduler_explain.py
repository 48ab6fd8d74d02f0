"""`oppo scheduler --explain`: the plan as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from oppo_cli.simulate_tables import console

if TYPE_CHECKING:
    from rich.console import Console

    from oppo_platform.runs.models import Run
    from oppo_platform.scheduling.cycle import CycleResult
    from oppo_platform.scheduling.explanation import PlanLine
    from oppo_platform.scheduling.policy import Decisions

MAX_LINES = 200
FILE_WIDTH = 500  # without a terminal: one line per run, for grep


def explain(once: bool) -> None:
    """Print the plan; with `once`, run the cycle first."""
    from oppo_platform.scheduling.cycle import run_cycle
    from oppo_platform.scheduling.explanation import current_plan, explain_plan

    screen = console(FILE_WIDTH)
    result = run_cycle() if once else None
    if once and result is None:
        screen.print("Another scheduler is running a cycle, so nothing was done. The plan below is what this one would decide.")
    decisions = current_plan() if result is None else result.decisions
    print_plan(screen, explain_plan(decisions), decisions, result)


def print_plan(screen: Console, lines: list[tuple[PlanLine, Run]], decisions: Decisions, result: CycleResult | None) -> None:
    """Print the plan as a table, and a summary of the cycle."""
    table = Table(box=None, pad_edge=False)
    for heading in ("decision", "because", "run", "team"):
        table.add_column(heading, no_wrap=True)
    for heading in ("priority", "devices"):
        table.add_column(heading, justify="right")
    for heading in ("reason", "expected start"):
        table.add_column(heading)
    for line, run in lines[:MAX_LINES]:
        start = "now" if line.verb == "start" else "" if line.start is None else f"{line.start:%Y-%m-%d %H:%M:%S} UTC"
        name, team = escape(f"{run.pk} {run.name}"), escape(run.project.team.name)
        table.add_row(line.verb, line.code, name, team, str(run.priority), str(run.devices), escape(line.text), start)
    if lines:
        screen.print(table, highlight=False)
    if len(lines) > MAX_LINES:
        screen.print(f"… and {len(lines) - MAX_LINES} more", highlight=False)
    counts = f"{len(decisions.placements)} to start, {len(decisions.preemptions)} to stop, {len(decisions.reasons)} to wait"
    if result is None:
        screen.print(f"Plan: {counts}. Nothing was changed; --once runs the cycle.", highlight=False)
    else:
        done = f"{result.placed} started, {result.preempted} preempted, {result.fenced} fenced, {result.sent} orders sent"
        screen.print(f"Plan: {counts}. Done: {done}.", highlight=False)
