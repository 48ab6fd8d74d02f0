"""Terminal output of `oppo simulate`: progress and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

if TYPE_CHECKING:
    from oppo_contract import RunSpec
    from oppo_estimate.devices import Devices
    from oppo_estimate.schedules import Row, Target

LINE_INTERVAL_S = 10.0
FILE_WIDTH = 130


def console(file_width: int = FILE_WIDTH) -> Console:
    """The terminal, or a console of `file_width` columns without one."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=file_width)


class Progress:
    """Progress of a simulation: a bar on a terminal, otherwise a line every 10 s."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._bars = Bars(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True)
        self._total = total
        self._done = 0
        self._next_line = time.monotonic() + LINE_INTERVAL_S

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bars.start()
            self._task = self._bars.add_task("simulating", total=self._total)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def show(self, what: str, step: int) -> None:
        """Count a finished step of schedule `what`."""
        self._done += 1
        if self._console.is_terminal:
            self._bars.update(self._task, completed=self._done, description=f"simulating {what}")
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_INTERVAL_S
            self._console.print(f"simulating {what}: step {step}, {self._done} of {self._total} in all")


def print_plan(console: Console, spec: RunSpec, devices: Devices, target: Target, steps: int, rows: list[Row]) -> None:
    """Print the table of a plan and its assumptions."""
    groups = f" groups of {spec.ppo.group_size}" if spec.ppo.group_size > 1 else ""
    title = f"{escape(spec.name)} on {devices.name}: B {spec.ppo.batch_size}{groups}, {len(devices.names)} devices"
    console.print(plan_table(title, devices, rows), highlight=False)
    for row in rows:
        if row.problem:
            console.print(f"{row.schedule} is not simulated: {row.problem}", highlight=False)
    console.print(assumptions(spec, devices, target, steps), highlight=False, style="dim")


def plan_table(title: str, devices: Devices, rows: list[Row]) -> Table:
    """One line per schedule, with idle shares by group of devices."""
    groups = {span(names): names for names in (devices.group(name) for name in ("actor", *devices.groups))}
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    bubbles = [f"idle {names}" for names in groups]
    for heading in ("a step", "µs a token", *bubbles, "rows", "stale", "to target", "device time", "speed-up"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.problem:
            table.add_row(row.schedule, *["–"] * (7 + len(groups)))
            continue
        idle = [percent(fmean((row.bubble or {})[name] for name in names)) for names in groups.values()]
        table.add_row(
            row.schedule, duration(row.step_s), f"{row.us_per_token:,.0f}", *idle, percent(row.occupancy),
            percent(row.stale_share), duration(row.hours_to_target * 3600), duration(row.device_hours * 3600),
            f"{row.speedup:.2f} ×" if row.speedup else "–",
        )  # fmt: skip
    return table


def span(names: Sequence[str]) -> str:
    """`gpu:0–6` for seven devices, `gpu:7` for one."""
    last = names[-1].rpartition(":")[2]
    return f"{names[0]}–{last}" if len(names) > 1 else names[0]


def assumptions(spec: RunSpec, devices: Devices, target: Target, steps: int) -> str:
    """Text of a plan's assumptions."""
    cost = f", {target.staleness_cost:g} × the stale share more" if target.staleness_cost else ", stale tokens count in full"
    excluded = min(spec.overlap.max_age + 1, steps - 1)
    return (
        f"Response lengths: {lengths_text(devices)}, cut at {spec.rollout.max_new_tokens:,} tokens. "
        f"Target: {target.steps:,} steps{cost}. Means of {steps} simulated steps, without the first {excluded}."
        " rows: mean rows that decode ÷ (B+Δ);"
        " stale: trained tokens that were sampled under older weights; speed-up: by time a trained token."
    )


def lengths_text(devices: Devices) -> str:
    """Text of the workload's response lengths."""
    lengths = devices.workload.lengths
    return f"log-normal, median {lengths.median:g}, σ {lengths.sigma:g}" if lengths.kind == "log-normal" else "from a list"


def percent(share: float) -> str:
    """A share between 0 and 1 in per cent."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    if seconds < 1:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:,.1f} h"
