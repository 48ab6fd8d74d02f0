"""`oppo spec`: check a spec, print its schema or an example."""

from __future__ import annotations

import json
from pathlib import Path

import click

from oppo_cli.examples import EXAMPLES, example_text
from oppo_cli.home import Refusal
from oppo_cli.spec_files import read_spec


@click.group()
def spec() -> None:
    """Work with run specs."""


@spec.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Check a spec FILE. Models and prompts are looked up at submit, not here."""
    checked = read_spec(file)
    click.echo(f"{file}: valid. {checked.name}: {checked.steps} steps, batch {checked.ppo.batch_size}.")


@spec.command()
def schema() -> None:
    """Print the JSON schema of a spec."""
    from oppo_contract import RunSpec

    click.echo(json.dumps(RunSpec.model_json_schema(), indent=2, ensure_ascii=False))


@spec.command()
@click.argument("name", type=click.Choice(EXAMPLES), default="oppo")
def example(name: str) -> None:
    """Print an example spec to start from."""
    try:
        click.echo(example_text(name), nl=False)
    except OSError as error:
        raise Refusal(f"The example {name} is not installed: {error}") from error
