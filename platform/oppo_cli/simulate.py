"""`oppo simulate`: cost of a run on virtual devices, or of a recorded run under other schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oppo_cli.home import Failure, Refusal
from oppo_cli.spec_commands import read_spec

if TYPE_CHECKING:
    from oppo_cli.simulate_events import Questions
    from oppo_contract import RunSpec
    from oppo_estimate.devices import Devices

STEPS = 60
MOST_REPLAYED = 500  # of a run's first steps


@click.command()
@click.argument("spec_file", metavar="[SPEC.yaml]", required=False, type=click.Path(path_type=Path))
@click.option("--devices", "devices_name", metavar="NAME|FILE", help="Virtual devices: a built-in name or a YAML or JSON file.")
@click.option("--list", "list_devices", is_flag=True, help="List the built-in devices and exit.")
@click.option("--steps", type=click.IntRange(3, 100_000), help=f"Steps to simulate a schedule. Default: {STEPS}, or as recorded.")
@click.option("--target-steps", type=click.IntRange(min=1), help="Sequential steps to the target. Default: the spec's steps.")
@click.option(
    "--staleness-cost", type=click.FloatRange(min=0), default=0.0, show_default=True,
    help="Extra share of steps when every token is stale; 0: stale tokens are as useful as fresh ones.",
)  # fmt: skip
@click.option(
    "--overcommit",
    "overcommits",
    type=click.IntRange(min=0),
    multiple=True,
    help="Also simulate both overlaps with this Δ. Repeatable.",
)
@click.option("--from-events", "events_file", type=click.Path(path_type=Path), help="Replay a run: its events.jsonl.")
@click.option("--from-run", "run_id", type=click.IntRange(min=1), help="Replay a run of the platform, by its number.")
@click.option(
    "--batch-size", "batch_sizes", type=click.IntRange(min=1), multiple=True, help="Also replay with this B. Repeatable."
)
@click.option(
    "--device-count",
    "device_counts",
    type=click.IntRange(min=1),
    multiple=True,
    help="Also replay on so many devices. Repeatable.",
)
@click.option("--paper", is_flag=True, help="The placements of the OPPO paper, and their sensitivity to each assumption.")
@click.option("--scale", is_flag=True, help="Four sharded 7B models on 8 and 64 GPUs, by batch size and response length.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results as JSON.")
def simulate(
    spec_file: Path | None,
    devices_name: str | None,
    list_devices: bool,
    steps: int | None,
    target_steps: int | None,
    staleness_cost: float,
    overcommits: tuple[int, ...],
    events_file: Path | None,
    run_id: int | None,
    batch_sizes: tuple[int, ...],
    device_counts: tuple[int, ...],
    paper: bool,
    scale: bool,
    json_file: Path | None,
) -> None:
    """Plan a run: time per step, bubbles and device hours of every schedule, on virtual devices.

    The engine's loop, controllers and accounting run on a virtual clock with a cost model (docs/simulation.md). With
    --from-events or --from-run the costs are fitted to a recorded run, and the table shows what that run would have taken.
    """
    recorded = events_file is not None or run_id is not None
    if (batch_sizes or device_counts) and not recorded:
        raise Refusal("--batch-size and --device-count change a recorded run: add --from-run or --from-events.")
    if list_devices:
        _list_devices()
    elif paper or scale:
        _write(json_file, _study(paper, steps))
    elif recorded:
        from oppo_cli.simulate_events import Questions

        questions = Questions(overcommits, batch_sizes, device_counts, target_steps, staleness_cost)
        _write(json_file, _replay(events_file, run_id, spec_file, steps or MOST_REPLAYED, questions))
    else:
        spec, devices = _given(spec_file, devices_name)
        target = (target_steps or spec.steps, staleness_cost)
        _write(json_file, _plan(spec, devices, steps or STEPS, target, overcommits))


def _study(paper: bool, steps: int | None) -> dict[str, Any]:
    """The placements of the paper, or four sharded 7B models."""
    from oppo_cli.simulate_paper import paper_report
    from oppo_cli.simulate_scale import scale_report

    return paper_report(steps) if paper else scale_report(steps)


def _given(spec_file: Path | None, devices_name: str | None) -> tuple[RunSpec, Devices]:
    """The spec and the virtual devices. Raises Refusal."""
    if spec_file is None or devices_name is None:
        raise Refusal(
            "Give a spec and --devices, or --from-run, --from-events, --paper, --scale or --list; see `oppo simulate --help`."
        )
    return read_spec(spec_file), _load_devices(devices_name)


def _replay(file: Path | None, run_id: int | None, spec_file: Path | None, steps: int, questions: Questions) -> dict[str, Any]:
    from oppo_cli.client_commands import signed_in
    from oppo_cli.simulate_events import events_report, run_report

    if file is not None:
        return events_report(file, read_spec(spec_file) if spec_file else None, questions)
    assert run_id is not None
    with signed_in() as client:
        return run_report(client.get(run_id), steps, questions)


def _load_devices(name: str) -> Devices:
    """Built-in devices or those of a file. Raises Refusal with all errors."""
    from oppo_estimate.devices import DevicesError, load_devices

    try:
        return load_devices(name)
    except DevicesError as error:
        raise Refusal(str(error)) from None


def _plan(
    spec: RunSpec, devices: Devices, steps: int, target_options: tuple[int, float], overcommits: tuple[int, ...]
) -> dict[str, Any]:
    from oppo_cli.simulate_tables import Progress, console, print_plan
    from oppo_core.simulation.plan import plan
    from oppo_estimate.schedules import SCHEDULES, Target

    screen = console()
    target = Target(*target_options)
    with Progress(screen, (len(SCHEDULES) + len(overcommits)) * steps) as progress:
        rows = plan(spec, devices, target, steps, overcommits, progress=progress.show)
    print_plan(screen, spec, devices, target, steps, rows)
    return {
        "simulate": spec.name, "devices": devices.model_dump(mode="json"), "steps": steps, "target_steps": target.steps,
        "staleness_cost": target.staleness_cost, "rows": [row.as_json() for row in rows],
    }  # fmt: skip


def _list_devices() -> None:
    from oppo_estimate.devices import builtin_names, load_devices

    for name in builtin_names():
        click.echo(f"{name:20} {load_devices(name).description}")


def _write(file: Path | None, document: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise Failure(f"{file} cannot be written: {error.strerror}.") from error
