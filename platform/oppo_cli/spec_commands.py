"""`oppo spec`: validate a spec, print its schema or an example."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oppo_cli.examples import SPECS
from oppo_cli.home import Refusal
from oppo_contract.presets import example_text

if TYPE_CHECKING:
    from oppo_contract import RunSpec


@click.group()
def spec() -> None:
    """Work with run specs."""


@spec.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--deep", is_flag=True, help="Also check models, prompts, reward, memory and disk on this machine.")
@click.option(
    "--root", "roots", multiple=True, type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Root folder of model and prompt ids, for --deep. Repeatable.",
)  # fmt: skip
def check(file: Path, deep: bool, roots: tuple[Path, ...]) -> None:
    """Validate a spec FILE. Models and prompts are only checked with --deep and at submit."""
    spec = read_spec(file)
    if deep:
        _check_deep(spec, list(roots))
    click.echo(f"{file}: valid. {spec.name}: {spec.steps} steps, batch {spec.ppo.batch_size}.")


def _check_deep(spec: RunSpec, roots: list[Path]) -> None:
    """Print memory and disk use on this machine. Raises Refusal with all errors that prevent the first step."""
    from oppo_contract.machine import mib
    from oppo_core.engine.preflight import error_text, preflight

    findings = preflight(spec, roots, Path())
    for device in findings.memory:
        for item in device.items:
            click.echo(f"{item.name:32} {mib(item.size):>14}  = {item.arithmetic}")
        total = "total memory" + (f", {device.device}" if len(findings.memory) > 1 else "")
        click.echo(f"{total:32} {mib(device.needed):>14}  of {mib(device.available)} free")
    if findings.memory:
        click.echo(f"{'a checkpoint':32} {mib(findings.checkpoint):>14}  on disk")
    if findings.errors:
        raise Refusal(
            "This run could not train its first step here:\n" + "\n".join(f"- {error_text(e)}" for e in findings.errors)
        )


@spec.command()
def schema() -> None:
    """Print the JSON schema of a spec."""
    from oppo_contract import RunSpec

    click.echo(json.dumps(RunSpec.model_json_schema(), indent=2, ensure_ascii=False))


@spec.command()
@click.argument("name", type=click.Choice(SPECS), default="oppo")
def example(name: str) -> None:
    """Print an example spec."""
    try:
        click.echo(example_text(name), nl=False)
    except OSError as error:
        raise Refusal(f"The example {name} is not installed: {error}") from error


def read_spec(file: Path) -> RunSpec:
    """A valid spec. Raises Refusal (exit status 2) with one line per problem."""
    from oppo_contract import SpecError
    from oppo_contract.spec import MAX_SPEC_BYTES
    from oppo_contract.yaml_text import load_yaml

    try:
        with file.open("rb") as content:
            text = content.read(MAX_SPEC_BYTES + 1).decode()
        if len(text.encode()) > MAX_SPEC_BYTES:
            raise Refusal(f"{file} is {file.stat().st_size:,} bytes long; the limit is {MAX_SPEC_BYTES:,}.")
        return load_yaml(text)
    except OSError as error:
        raise Refusal(f"{file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise Refusal(f"{file} is not UTF-8 text.") from error
    except SpecError as error:
        raise Refusal(f"{file} is invalid:\n" + "\n".join(f"  {problem}" for problem in error.problems)) from error
