"""Terminal output of the demo: progress of the runs and the table. Plain lines without a terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from oppo_cli.demo_figures import Row
from oppo_cli.train import REWARD, reward_text
from oppo_client.run_base import ENDED

LINE_INTERVAL_S = 10.0
BAR_CELLS = 28


class RunsScreen:
    """Progress of the runs; `show` is called about once a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_line = 0.0
        self._printed_states: dict[int, str] = {}

    def __enter__(self) -> RunsScreen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, runs: list[dict[str, Any]]) -> None:
        """Show the runs' summaries."""
        if self._live:
            self._live.update(_progress_table(runs), refresh=True)
            return
        due = time.monotonic() >= self._next_line
        if due:
            self._next_line = time.monotonic() + LINE_INTERVAL_S
        for run in runs:
            changed = self._printed_states.get(run["id"]) != run["state"]
            if changed or (due and run["state"] == "running"):
                self._printed_states[run["id"]] = run["state"]
                self._console.print(_line(run), highlight=False)


def _line(run: dict[str, Any]) -> str:
    line = f"{run['name']}: {run['state']}, step {run['step']}/{run['total_steps']}, reward {_reward(run)}"
    return line + (f", {_left(run)} left" if run["state"] == "running" else "")


def _progress_table(runs: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "", "step", "reward", "left"):
        table.add_column(heading, no_wrap=True)
    for run in runs:
        done = run["step"] / max(1, run["total_steps"])
        filled = round(BAR_CELLS * done)
        bar = f"[green]{'━' * filled}[/green][dim]{'━' * (BAR_CELLS - filled)}[/dim]"
        table.add_row(run["name"], run["state"], bar, f"{run['step']}/{run['total_steps']}", _reward(run), _left(run))
    return table


def _reward(run: dict[str, Any]) -> str:
    return reward_text(run["latest"].get(REWARD))


def _left(run: dict[str, Any]) -> str:
    if run["state"] in ENDED or run.get("eta_s") is None:
        return "–"
    minutes, seconds = divmod(round(run["eta_s"]), 60)
    return f"{minutes}:{seconds:02d}"


def print_table(console: Console, rows: list[Row], warmup: int) -> None:
    """Print the comparison and the steps that times exclude."""
    table = Table(title="Sequential PPO and OPPO, same seed, same work", title_justify="left")
    table.add_column("")
    for heading in ("sequential", "OPPO", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.label, row.sequential, row.oppo, f"{row.ratio:.2f} ×" if row.ratio else "")
    console.print(table)
    console.print(
        f"Ratio: sequential ÷ OPPO. Time per step and per token exclude the first {warmup} steps of both runs, "
        + ("while OPPO's pool fills." if warmup > 1 else "which warms up."),
        style="dim",
    )
