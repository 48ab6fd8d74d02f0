"""`oppo trace`: a run's timeline as Chrome trace, for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oppo_cli.home import Refusal

if TYPE_CHECKING:
    from oppo_contract.events import Event


@click.command()
@click.argument("events", metavar="EVENTS.jsonl", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file to write.")
@click.option("--from-step", type=click.IntRange(min=1), help="First step. Default: the run's first step.")
@click.option("--to-step", type=click.IntRange(min=1), help="Last step. Default: the run's last step.")
def trace(events: Path, out: Path, from_step: int | None, to_step: int | None) -> None:
    """Write a run's timeline as Chrome trace JSON; open it at ui.perfetto.dev or chrome://tracing.

    EVENTS.jsonl is the file that `oppo train` or a worker writes in the run's folder, also while it trains.
    """
    from oppo_contract.chrome_trace import chrome_trace

    try:
        document = chrome_trace(_filter_steps(_read_events(events), from_step, to_step))
    except ValueError as error:
        raise Refusal(f"{events}: {error}") from None
    out.write_text(json.dumps(document, separators=(",", ":")) + "\n")
    steps = sum(event["name"].startswith("step ") for event in document["traceEvents"] if event["ph"] == "X")
    click.echo(f"{out}: {len(document['traceEvents'])} trace events of {steps} steps")


def _read_events(file: Path) -> Iterator[Event]:
    """Events of a file, without an incomplete last line. Raises ValueError for a line that is not an event."""
    from oppo_contract.events import parse_event

    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield parse_event(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not an event: {str(error).splitlines()[0]}") from None


def _filter_steps(events: Iterator[Event], first: int | None, last: int | None) -> Iterator[Event]:
    """Events of steps `first` to `last`, and events without a step."""
    for event in events:
        step = getattr(event, "step", None)
        if step is None or ((first is None or step >= first) and (last is None or step <= last)):
            yield event
