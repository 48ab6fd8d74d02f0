"""`oppo simulate --scale`: which overlap pays on 8 and 64 GPUs, by batch size and response length, and its sensitivity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from oppo_cli.simulate_tables import Progress, console, percent

if TYPE_CHECKING:
    from oppo_core.simulation.paper import Case
    from oppo_estimate.schedules import Row

SCHEDULES = ("sequential", "inter", "intra", "both")
Results = list[tuple["Case", dict[str, "Row"]]]


def scale_report(steps: int | None) -> dict[str, Any]:
    """Simulate and print; returns the results as JSON data. `steps`: simulated steps per schedule; default by batch size."""
    from oppo_core.simulation.paper import simulate_case
    from oppo_core.simulation.scale import STEPS, sensitivity_cases, table_cases

    screen, cells, changes = console(), table_cases(), sensitivity_cases()
    counts = {batch: steps or count for batch, count in STEPS.items()}
    total = sum(len(SCHEDULES) * counts[case.spec.ppo.batch_size] for case in (*cells, *changes))
    with Progress(screen, total) as progress:
        table, sensitivity = (
            [(case, simulate_case(case, counts[case.spec.ppo.batch_size], progress.show)) for case in cases]
            for cases in (cells, changes)
        )
    screen.print(_speedups("Four 7B models, sharded by FSDP2", "GPUs, batch, responses", table), highlight=False)
    screen.print(_speedups("\nWhat each assumption changes, alone", "assumption", sensitivity), highlight=False)
    screen.print(_assumptions(counts), highlight=False, style="dim")
    return {"simulate": "scale", "steps": counts, "table": _as_json(table), "sensitivity": _as_json(sensitivity)}


def _as_json(results: Results) -> dict[str, list[dict[str, Any]]]:
    return {case.name: [row.as_json() for row in rows.values()] for case, rows in results}


def _speedups(title: str, heading: str, results: Results) -> Table:
    """A line per case: the sequential step, the speed-ups over it, and what explains them."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(heading, no_wrap=True)
    for column in ("sequential", "decoding", "inter", "intra", "both", "stale", "skew, sequential", "both"):
        table.add_column(column, justify="right", no_wrap=True)
    for case, rows in results:
        sequential, inter, intra, both = (rows[schedule] for schedule in SCHEDULES)
        gains = [f"{row.speedup:.2f} ×" for row in (inter, intra, both)]
        skews = [percent(row.skew) for row in (sequential, both)]
        step = f"{sequential.step_s:,.1f} s"
        table.add_row(case.name, step, percent(sequential.decode_share), *gains, percent(inter.stale_share), *skews)
    return table


def _assumptions(counts: dict[int, int]) -> str:
    from oppo_core.simulation.scale import GPUS_PER_REWARD, MACHINE, SENSITIVE_BATCH, SENSITIVE_LONGEST, SIGMA

    steps = ", ".join(f"{count} at B {batch:,}" for batch, count in counts.items())
    return (
        f"\nAssumed: {MACHINE}; responses log-normal, median an eighth of the longest, σ {SIGMA}; prompts of 256; one epoch,"
        f" Δ B ÷ 4, C an eighth of the longest response, max_age 2. Simulated steps: {steps}. sequential and inter: all GPUs do"
        f" every stage; intra and both: the reward model is served on one GPU in {GPUS_PER_REWARD}, the other models are sharded"
        f" over the rest. Assumptions are changed at B {SENSITIVE_BATCH} with responses to {SENSITIVE_LONGEST:,}. skew: share of"
        " a step that a device waits for slower ranks. Sources and limitations: docs/simulation.md."
    )
