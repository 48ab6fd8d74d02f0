"""`oppo simulate --from-events` and `--from-run`: costs of a recorded run, and its time under other settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from oppo_cli.home import Refusal
from oppo_cli.simulate_tables import Progress, console, duration, percent, plan_table

if TYPE_CHECKING:
    from oppo_client import Run
    from oppo_contract import RunSpec
    from oppo_core.simulation.counterfactual import Check
    from oppo_core.simulation.fit_costs import Fit
    from oppo_core.simulation.recording import Recording


DETAILED_STEPS = 50  # that the API returns at once with every span


@dataclass(frozen=True, slots=True)
class Questions:
    """What to simulate besides the schedules, and how many sequential steps the target takes (None: as many as recorded)."""

    overcommits: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    device_counts: tuple[int, ...] = ()
    target_steps: int | None = None
    staleness_cost: float = 0.0


def events_report(file: Path, spec: RunSpec | None, questions: Questions) -> dict[str, Any]:
    """Print the fit, its check and the table; returns them as JSON data. Raises Refusal for events that cannot be replayed."""
    from oppo_core.simulation.recording import read_recording

    return _report(lambda: read_recording(file, spec), questions)


def run_report(run: Run, steps: int, questions: Questions) -> dict[str, Any]:
    """The same for the first `steps` steps of a run of the platform. Raises Refusal, and the client's errors."""
    return _report(lambda: download_recording(run, steps), questions)


def download_recording(run: Run, steps: int) -> Recording:
    """At most so many steps of a run, from its first one on. Raises RecordingError, and the client's errors."""
    from oppo_contract.events import SpansEvent, StartedEvent
    from oppo_contract.yaml_text import load_yaml
    from oppo_core.simulation.recording import METRICS, recorded

    envelope: dict[str, Any] = {"producer": "engine", "seq": 1, "time": 0.0}
    table = run.metrics(METRICS, frame=False)
    rows = zip(*(table[name] for name in ("step", *METRICS)), strict=True)
    metrics = {int(step): dict(zip(METRICS, values, strict=True)) for step, *values in rows if step <= steps}
    timelines, started = {}, {"devices": [], "lanes": []}
    for first in range(1, len(metrics) + 1, DETAILED_STEPS):
        timeline = run.timeline(range(first, first + DETAILED_STEPS)).data
        started = {"devices": timeline["devices"], "lanes": timeline["lanes"]}
        timelines |= {step["step"]: SpansEvent.model_validate(envelope | step) for step in timeline["steps"]}
    spec = load_yaml(run.spec_yaml())
    event = StartedEvent.model_validate(envelope | started | {"start_step": 0, "total_steps": spec.steps})
    return recorded(f"run {run.id}", spec, event, metrics, timelines)


def _report(read: Callable[[], Recording], questions: Questions) -> dict[str, Any]:
    from oppo_core.simulation.counterfactual import changes, check, counterfactuals
    from oppo_core.simulation.fit_costs import fit
    from oppo_core.simulation.recording import RecordingError
    from oppo_estimate.schedules import Target

    screen = console()
    try:
        recording = read()
        fitted = fit(recording)
    except RecordingError as error:
        raise Refusal(str(error)) from None
    checked = check(recording, fitted)
    target = Target(questions.target_steps or len(recording.steps), questions.staleness_cost)
    changed = changes(questions.overcommits, questions.batch_sizes, questions.device_counts)
    with Progress(screen, len(changed) * len(recording.steps)) as progress:
        rows = counterfactuals(recording, fitted, target, changed, progress.show)
    _print_fit(screen, recording, fitted, checked)
    title = f"{escape(recording.spec.name)}: what its {len(recording.steps):,} steps would have taken"
    screen.print(plan_table(title, fitted.devices, rows), highlight=False)
    for row in rows:
        if row.problem:
            screen.print(f"{row.schedule} is not simulated: {row.problem}", highlight=False)
    screen.print(_caveat(recording), highlight=False, style="dim")
    return {
        "simulate": recording.spec.name, "steps": len(recording.steps), "target_steps": target.steps,
        "staleness_cost": target.staleness_cost, "devices": fitted.devices.model_dump(mode="json"),
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
