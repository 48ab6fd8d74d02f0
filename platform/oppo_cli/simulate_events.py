"""`oppo simulate --from-events`: costs of a recorded run, and its time under other schedules."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oppo_cli.home import Refusal
from oppo_cli.simulate_tables import Progress, console, duration, percent, plan_table

if TYPE_CHECKING:
    from oppo_contract import RunSpec
    from oppo_core.simulation.counterfactual import Check
    from oppo_core.simulation.fit_costs import Fit
    from oppo_core.simulation.recording import Recording


def events_report(
    file: Path, spec: RunSpec | None, overcommits: tuple[int, ...], target_steps: int | None, staleness_cost: float
) -> dict[str, Any]:
    """Print the fit, its check and the table; returns them as JSON data. Raises Refusal for events that cannot be replayed."""
    from oppo_core.simulation.counterfactual import check, counterfactuals
    from oppo_core.simulation.fit_costs import fit
    from oppo_core.simulation.recording import RecordingError, read_recording
    from oppo_estimate.schedules import SCHEDULES, Target

    screen = console()
    try:
        recording = read_recording(file, spec)
        fitted = fit(recording)
    except RecordingError as error:
        raise Refusal(str(error)) from None
    checked = check(recording, fitted)
    target = Target(target_steps or len(recording.steps), staleness_cost)
    total = (len(SCHEDULES) + len(overcommits)) * len(recording.steps)
    with Progress(screen, total) as progress:
        rows = counterfactuals(recording, fitted, target, overcommits, progress.show)
    _print_fit(screen, recording, fitted, checked)
    title = f"{escape(recording.spec.name)}: what its {len(recording.steps):,} steps would have taken"
    screen.print(plan_table(title, fitted.devices, rows), highlight=False)
    for row in rows:
        if row.problem:
            screen.print(f"{row.schedule} is not simulated: {row.problem}", highlight=False)
    screen.print(_caveat(recording), highlight=False, style="dim")
    return {
        "simulate": recording.spec.name, "steps": len(recording.steps), "target_steps": target.steps,
        "staleness_cost": staleness_cost, "devices": fitted.devices.model_dump(mode="json"),
        "blocks": [asdict(block) for block in fitted.blocks], "other_s": fitted.other_s,
        "check": asdict(checked) | {"error": checked.error}, "rows": [row.as_json() for row in rows],
    }  # fmt: skip


def _print_fit(screen: Console, recording: Recording, fitted: Fit, checked: Check) -> None:
    table = Table(title="costs fitted to its spans", title_justify="left", box=None, pad_edge=False)
    table.add_column("work", no_wrap=True)
    for heading in ("spans", "seconds", "error of one"):
        table.add_column(heading, justify="right")
    table.add_column("µs", overflow="fold")
    for block in fitted.blocks:
        costs = ", ".join(f"{path.rpartition('.')[2].removesuffix('_us')} {us:,.2f}" for path, us in block.costs.items())
        table.add_row(block.name, f"{block.spans:,}", f"{block.seconds:.3f}", percent(block.error), costs)
    screen.print(table, highlight=False)
    screen.print(
        f"Other costs: {duration(fitted.other_s)} a step. The recorded schedule, replayed with these costs:"
        f" {duration(checked.replayed_s)} against {duration(checked.recorded_s)} recorded ({100 * checked.error:+.1f} %);"
        f" mean error of a single step: {percent(checked.step_error)}.\n",
        highlight=False,
    )


def _caveat(recording: Recording) -> str:
    from oppo_core.simulation.replay import DECODE_PARALLEL, PASS_PARALLEL

    overlap = recording.spec.overlap
    own = f"intra_step {overlap.intra_step}, inter_step {overlap.inter_step}"
    return (
        f"Recorded with {own}. Costs include the slowdown that processes caused each other in this run."
        f" A second device is assumed to add {DECODE_PARALLEL:g} to a decode round's rows and {PASS_PARALLEL:g} to a pass."
        " Steps that deferred keep the run's Δ; lengths of unfinished responses are drawn from finished ones."
    )
